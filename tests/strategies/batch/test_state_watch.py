"""State that a training step carries to the next is one device's, or refused where each part of a batch has its own."""

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, weights
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from evener.strategies import (
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.strategies.core.errors import ConfigError


class Keeping(Net):
    """Writes something to itself in a step, by the step's samples or not."""

    def __init__(self, keeps: str = "") -> None:
        super().__init__()
        self.keeps = keeps
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("largest", torch.full((1,), -10.0, dtype=torch.float64))
        self.register_buffer("bank", torch.zeros(8, 1, dtype=torch.float64))
        self.register_buffer("filled", torch.tensor(0))
        self.register_buffer("num_steps", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(1, dtype=torch.float64), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.replaced = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.attribute = torch.zeros(1, dtype=torch.float64)
        self.in_attribute = torch.zeros(1, dtype=torch.float64)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.net(batch[0]).detach()
        kept = 0.0
        if self.keeps == "mean":
            kept = self.mean.mul_(0.8).add_(0.2 * z.mean()).clone()
        elif self.keeps == "largest":
            self.largest = torch.maximum(self.largest, z.amax(0))
        elif self.keeps == "bank":
            with torch.no_grad():
                self.bank[int(self.filled) : int(self.filled) + len(z)] = z
                self.filled.add_(len(z)).remainder_(8)
        elif self.keeps == "frozen":
            self.frozen.data.mul_(0.8).add_(0.2 * z.mean())
        elif self.keeps == "replaced":
            self.replaced = nn.Parameter(0.8 * self.replaced + 0.2 * z.mean(), requires_grad=False)
        elif self.keeps == "attribute":
            self.attribute.mul_(0.8).add_(0.2 * z.mean())
        elif self.keeps == "in_attribute":
            self.in_attribute = 0.8 * self.in_attribute + 0.2 * z.mean()
        elif self.keeps == "scratch":
            self.scratch = z.mean(0)
        elif self.keeps == "counts":
            self.num_steps += 1
            self.steps += 1
            kept = 0.1 * self.num_steps + 0.1 * self.steps
        x, y, _ = batch
        return ((self.net(x) - kept - y) ** 2).mean()


class Hooked(Net):
    """Registers a hook that adds up what a layer computes when it is first called, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hooked, self.table = False, None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.is_hooked:
            self.is_hooked, self.has_flag, self.table = True, True, torch.ones(1, dtype=torch.float64)
            self.net[0].register_forward_hook(lambda part, args, out: self.found.append(out.square().mean(1)))
        self.found = list[torch.Tensor]()
        return super().training_step(batch, batch_idx) + torch.stack(self.found).sum(0).mean()


class Spectral(Net):
    """Has a layer whose weight is divided by an estimate that each forward pass improves, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = spectral_norm(self.net[0])


def _fit(strategy: pl.strategies.Strategy, devices: int, module: Net) -> Any:
    quiet_trainer(strategy, devices, max_epochs=1).fit(module, DataLoader(Numbered(12), 4))
    return module


def _warned(strategy: pl.strategies.Strategy, devices: int, keeps: str) -> list[str]:
    """What a warning names."""
    trainer = quiet_trainer(strategy, devices, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Keeping(keeps), DataLoader(Numbered(12), 4))
    messages = [str(warning.message) for warning in caught]
    return [message.partition(" otherwise")[0] for message in messages if "training_step changes" in message]


def _error(strategy: pl.strategies.Strategy, devices: int, keeps: str) -> tuple[str, int]:
    """How a run was refused, and the optimizer steps before."""
    module = Keeping(keeps)
    try:
        _fit(strategy, devices, module)
    except ConfigError as error:
        return str(error), module.trainer.global_step
    return "", -1


def _in_one_process(name: str) -> pl.strategies.Strategy:
    if name == "dp":
        return DataParallelStrategy(["cpu", "cpu"])
    devices = ["cpu"] * (2 if name == "stages" else 1)
    return ModelParallelStrategy(devices, num_microbatches=2)


def _over_ranks(name: str) -> pl.strategies.Strategy:
    if name == "fsdp":
        return FSDPStrategy(batch_size_is="global", timeout_s=120)
    if name == "ddp":
        return DDPStrategy(batch_size_is="global", timeout_s=120)
    return DDPModelParallelStrategy(model_parallel_size=1, num_microbatches=2, batch_size_is="global", timeout_s=120)


@pytest.mark.parametrize("keeps", ["mean", "largest", "bank", "frozen", "replaced", "attribute"])
@pytest.mark.parametrize("name", ["dp", "stages", "microbatches"])
def test_state_of_a_parts_samples_is_refused_in_one_process(name: str, keeps: str) -> None:
    # each replica had its own, of which the first one's stayed; micro-batches changed it once each
    message, steps = _error(_in_one_process(name), 1, keeps)
    assert f"training_step changes {keeps}" in message
    assert steps == 0


@pytest.mark.parametrize("name", ["dp", "stages", "microbatches"])
def test_counters_are_one_devices_in_one_process(name: str) -> None:
    expected = _fit(SingleDeviceStrategy(), 1, Keeping("counts"))
    module = _fit(_in_one_process(name), 1, Keeping("counts"))
    assert (module.num_steps, module.steps) == (3, 3) == (expected.num_steps, expected.steps)
    torch.testing.assert_close(weights(module), weights(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["stages", "microbatches"])
def test_what_a_step_does_when_it_is_first_called_is_done_once(name: str) -> None:
    expected = _fit(SingleDeviceStrategy(), 1, Hooked())
    module = _fit(_in_one_process(name), 1, Hooked())
    assert len(module.net[0]._forward_hooks) == 1
    torch.testing.assert_close(weights(module), weights(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["dp", "stages", "microbatches"])
def test_spectral_norm_is_one_devices_in_one_process(name: str) -> None:
    expected = _fit(SingleDeviceStrategy(), 1, Spectral())
    module = _fit(_in_one_process(name), 1, Spectral())
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=1e-10)


def _refused(name: str) -> dict[str, tuple[str, int]]:
    names = ("mean", "largest", "bank", "attribute", "frozen")
    return {keeps: _error(_over_ranks(name), 2, keeps) for keeps in names}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "ddp_model_parallel"])
def test_state_of_a_parts_samples_is_refused_over_ranks(name: str) -> None:
    for told in run_ranks(_refused, 2, name):
        for keeps, (message, steps) in told.items():
            assert f"{name}: training_step changes {keeps}" in message
            assert steps == 0


def _all_warned() -> list[list[str]]:
    return [_warned(_over_ranks("ddp"), 2, keeps) for keeps in ("in_attribute", "scratch", "counts")]


def test_an_attribute_that_each_rank_computes_from_its_own_samples_is_named() -> None:
    # rl4co's moving average of the reward, which its loss subtracts, was each rank's own without a word; whether a
    # later step reads an attribute can't be known
    assert run_ranks(_all_warned, 2)[0] == [
        ["ddp: training_step changes in_attribute"], ["ddp: training_step changes scratch"], []
    ]  # fmt: skip


def test_verify_loss_false_keeps_a_parts_state_with_a_warning() -> None:
    strategy = DataParallelStrategy(["cpu", "cpu"], verify_loss=False)
    assert _warned(strategy, 1, "mean") == ["dp: training_step changes mean"]
