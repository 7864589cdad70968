"""Measured shares while training: devices of unequal speed, the log, and checkpoints."""

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import Case, Net, baseline, make_trainer, run
from regression import Points
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


def test_auto_finds_the_shares_of_unequal_devices(clock: None) -> None:
    strategy = BalancedDataParallelStrategy()
    make_trainer(SLEEPY, strategy, devices=3).fit(Sleepy().double(), SLEEPY.loader(), SLEEPY.loader())
    assert strategy.controller is not None
    shares = strategy.controller.sizes(7000, 3)  # after 60 steps at costs of 3, 1, 1
    for size, ideal in zip(shares, (1000, 3000, 3000), strict=True):
        assert abs(size - ideal) <= 0.1 * ideal


def test_training_is_exact_while_shares_change_and_shares_times_and_efficiency_are_logged() -> None:
    logger, case = Points(), Case(num=120, batch_size=12, trainer={"max_epochs": 1, "log_every_n_steps": 5})
    strategy = BalancedDataParallelStrategy(hysteresis=0.0)
    found = run(case, strategy, devices=2, logger=logger)
    torch.testing.assert_close(found.weights, baseline(case).weights, rtol=0, atol=1e-10)
    logged = [values for _, values in logger.points if "balance/efficiency" in values]
    assert len(logged) == 2  # steps 5 and 10
    per_device = {f"balance/{kind}_{i}" for kind in ("share", "time_s") for i in range(2)}
    for values in logged:
        assert {name for name in values if name.startswith("balance/")} == {"balance/efficiency", *per_device}
        assert values["balance/share_0"] + values["balance/share_1"] == pytest.approx(1)


@pytest.mark.parametrize("devices", [3, 2])
def test_shares_go_through_a_checkpoint_to_as_many_devices(devices: int, tmp_path: Path, clock: None) -> None:
    strategy, resumed = BalancedDataParallelStrategy(), BalancedDataParallelStrategy()
    trainer = make_trainer(SLEEPY, strategy, devices=3, max_steps=8)
    trainer.fit(Sleepy().double(), SLEEPY.loader(), SLEEPY.loader())
    path = tmp_path / "balance.ckpt"
    trainer.save_checkpoint(path)
    shares = torch.load(path, weights_only=True)["balance"]["shares"]
    assert shares[0] < 1 / 4
    trainer = make_trainer(SLEEPY, resumed, devices=devices, max_steps=8)
    trainer.fit(Sleepy().double(), SLEEPY.loader(), SLEEPY.loader(), ckpt_path=path)
    assert resumed.controller is not None
    assert resumed.controller.shares == (shares if devices == 3 else [1 / 2] * 2)
