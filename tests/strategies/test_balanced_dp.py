"""Measured shares while training: devices of unequal speed, the log, and checkpoints."""

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import Case, Net, assert_equal, baseline, make_trainer, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from evener.strategies import BalancedDataParallelStrategy
from evener.strategies.core import devices as meter

SECONDS_PER_SAMPLE = 0.002


class Sleepy(Net):
    """A root device that is three times slower per sample than the others."""

    sleep = staticmethod(time.sleep)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        slowness = 3 if self is self.trainer.lightning_module else 1
        self.sleep(SECONDS_PER_SAMPLE * slowness * len(batch[0]))
        return super().training_step(batch, batch_idx)


SLEEPY = Case(Sleepy, num=70 * 60, batch_size=70, trainer={"max_epochs": 1, "limit_val_batches": 0})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only sleeping moves, each time up to 20% further: this machine's load does not matter."""
    noise, now = random.Random(1), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds * noise.uniform(1, 1.2)

    monkeypatch.setattr(Sleepy, "sleep", staticmethod(sleep))
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now[0]))


@pytest.mark.parametrize("policy", [{"weights": "auto"}, {"gpu0_chunk": "auto"}])
def test_auto_finds_the_shares_of_unequal_devices(policy: dict[str, Any], clock: None) -> None:
    strategy = BalancedDataParallelStrategy(**policy)
    make_trainer(SLEEPY, strategy, devices=3).fit(Sleepy().double(), SLEEPY.loader(), SLEEPY.loader())
    assert strategy.controller is not None
    shares = strategy.controller.propose(7000)  # after 60 steps at costs of 3, 1, 1
    for size, ideal in zip(shares, (1000, 3000, 3000), strict=True):
        assert abs(size - ideal) <= 0.1 * ideal


def test_training_stays_exact_while_shares_change() -> None:
    case = Case(num=120, batch_size=12)
    strategy = BalancedDataParallelStrategy(hysteresis=0.0)
    assert_equal(run(case, strategy, devices=3), baseline(case), 1e-10)


class Wide(Net):
    """Needs memory that grows with samples; the optimizer's state on the root does not."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x).repeat(1, 64).tanh().tanh()
        return self.net[2](hidden.view(len(x), 64, -1).mean(1))


def test_memory_is_balanced_against_the_optimizer_on_the_root() -> None:
    case = Case(Wide, num=160, batch_size=16, trainer={"limit_val_batches": 0})
    strategy = BalancedDataParallelStrategy(objective="memory", hysteresis=0.0)
    make_trainer(case, strategy, devices=2).fit(Wide().double(), case.loader(), case.loader())
    controller = strategy.controller
    assert controller is not None
    root, other = controller.costs()
    # parameters and gradients on both, AdamW's two states and step counts on the root
    parameters = sum(p.numel() for p in Wide().parameters())
    assert other.fixed_bytes == 2 * 8 * parameters
    assert root.fixed_bytes == 4 * 8 * parameters + 4 * len(list(Wide().parameters()))
    # each tanh saves its output of 64 × 8 numbers; what does not grow with samples is below 100 bytes a chunk
    for cost in (root, other):
        assert 2 * 64 * 8 * 8 < cost.bytes_per_sample < 2 * 64 * 8 * 8 + 400
    first, second = controller.propose(16)
    used = [cost.load(size, "memory") for cost, size in zip((root, other), (first, second), strict=True)]
    assert abs(used[0] - used[1]) <= root.bytes_per_sample


def test_shares_times_and_efficiency_are_logged(tmp_path: Path) -> None:
    logger = pl.loggers.TensorBoardLogger(tmp_path, name="", version="run")
    case = Case(num=40, trainer={"max_epochs": 1, "log_every_n_steps": 5})
    module = Net().double()
    make_trainer(case, "balanced_dp", devices=2, logger=logger).fit(module, case.loader(), case.loader())
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    names = {tag for tag in events.Tags()["scalars"] if tag.startswith("balance/")}
    per_device = ("share", "time_s", "bytes_per_sample")
    assert names == {"balance/efficiency", *(f"balance/{kind}_{i}" for kind in per_device for i in range(2))}
    shares = [[event.value for event in events.Scalars(f"balance/share_{i}")] for i in range(2)]
    assert len(shares[0]) == 2  # steps 5 and 10
    assert all(first + second == pytest.approx(1) for first, second in zip(*shares, strict=True))


def test_what_was_measured_goes_through_a_checkpoint(tmp_path: Path, clock: None) -> None:
    strategy = BalancedDataParallelStrategy()
    trainer = make_trainer(SLEEPY, strategy, devices=3, max_steps=8)
    trainer.fit(Sleepy().double(), SLEEPY.loader(), SLEEPY.loader())
    trainer.save_checkpoint(tmp_path / "balance.ckpt")
    assert torch.load(tmp_path / "balance.ckpt", weights_only=True)["balance"]["shares"] is not None
    resumed = BalancedDataParallelStrategy()
    trainer = make_trainer(SLEEPY, resumed, devices=3, max_steps=8)
    trainer.fit(Sleepy().double(), SLEEPY.loader(), SLEEPY.loader(), ckpt_path=tmp_path / "balance.ckpt")
    assert strategy.controller is not None
    assert resumed.controller is not None
    assert resumed.controller.state_dict() == strategy.controller.state_dict()


def test_a_checkpoint_of_other_devices_is_measured_anew(tmp_path: Path) -> None:
    case = Case(num=40, trainer={"max_epochs": 1})
    trainer = make_trainer(case, "balanced_dp", devices=2)
    trainer.fit(Net().double(), case.loader(), case.loader())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = BalancedDataParallelStrategy()
    make_trainer(case, resumed, devices=3, max_epochs=2).fit(
        Net().double(), case.loader(), case.loader(), ckpt_path=tmp_path / "two.ckpt"
    )
    assert resumed.controller is not None
    assert len(resumed.controller.shares) == 3
