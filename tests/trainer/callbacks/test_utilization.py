"""Operations are counted on fake tensors, once, and leave no trace in the module."""

import logging
import warnings
from typing import Any

import late_device
import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from late_device import Delays, needs_late_device
from tiny import Points, Tiny, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evener.examples.char_lm import CharLM
from evener.examples.stdlib_text import VOCABULARY_SIZE
from evener.trainer.callbacks import RunSummary, Utilization
from evener.trainer.callbacks.step_times import StepClock
from evener.trainer.callbacks.utilization import count_flops, peak_flops


def test_the_count_of_char_lm_is_within_two_percent_of_the_formula() -> None:
    module, width, blocks, num, length = CharLM(width=64, num_blocks=4), 64, 4, 3, 32
    # forward, per token: 12 width² weights a block, two operations each; scores and their sums over all positions;
    # the head. The last character has no successor. Backward costs twice as much
    forward = num * length * (blocks * (24 * width**2 + 4 * length * width) + 2 * width * VOCABULARY_SIZE)
    found = count_flops(module, torch.randint(1, VOCABULARY_SIZE, (num, length + 1)))
    assert found == pytest.approx(3 * forward, rel=0.02)
    assert all(parameter.grad is None for parameter in module.parameters())


class Linear(Tiny):
    """16 × 8 weights; counts its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_steps = nn.Linear(8, 16, bias=False), 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss)
        return loss


class Reads(Linear):
    """Its step depends on a value."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (2.0 if batch[0].sum().item() > 0 else 1.0)


def fit(module: pl.LightningModule) -> tuple[Utilization, dict[str, float]]:
    utilization, values = Utilization(peak_tflops=2.0), Points()
    trainer = quiet(log_every_n_steps=2, logger=values, callbacks=[RunSummary(), utilization])
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(24, 8)), batch_size=4))
    return utilization, values.last()


class Takes(Linear):
    """By its own clock a step takes 1 s forward, 2 s backward, and 4 s for the update."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.layer.weight.register_hook(lambda _: self.wait(2.0))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.wait(1.0)
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.wait(8.0)  # within forward, as Lightning calls it after the step has returned the loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.wait(4.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.wait(1000.0)


def test_a_step_is_split_into_forward_backward_and_update() -> None:
    module, values, summary = Takes(), Points(), RunSummary()
    summary.clock = StepClock(lambda: module.now_s)
    callbacks = [summary, Utilization(peak_tflops=2.0)]
    options = {"accumulate_grad_batches": 2, "val_check_interval": 6, "log_every_n_steps": 2}
    loader = DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4)
    quiet(logger=values, callbacks=callbacks, **options).fit(module, loader, loader)
    # two batches per optimizer step; Lightning zeroes the gradients at the first, and the update comes at the last
    seen, parts = values.last(), ("forward", "backward", "optimizer", "compute", "step")
    assert [seen[f"speed/{name}_ms"] for name in parts] == pytest.approx([10_000, 4000, 4000, 18_000, 18_000])
    assert seen["speed/samples_per_s"] == pytest.approx(8 / 18)


def test_utilization_is_operations_per_second_over_the_peak() -> None:
    module = Linear()
    utilization, seen = fit(module)
    # per sample 2 · 8 · 16 forward, and the same for the gradient of the weights; the input needs none
    assert utilization.flops_per_sample == 2 * 2 * 8 * 16
    assert seen["speed/tflops"] == pytest.approx(512 * seen["speed/samples_per_s"] / 1e12)
    assert seen["speed/utilization"] == pytest.approx(seen["speed/tflops"] / 2.0)
    assert module.num_steps == 6


def test_a_step_that_reads_values_is_not_counted_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "evener.trainer.callbacks.utilization"):
        utilization, seen = fit(Reads())
    assert utilization.flops_per_sample is None
    assert "speed/tflops" not in seen
    assert "can't be counted without values" in caplog.text


def test_the_peak_of_a_known_device_is_looked_up_and_another_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda"), "bf16-mixed") == 989e12
    assert 1e8 < peak_flops(torch.device("cpu"), "32-true") < 1e14


def fit_on_late_device() -> float:
    """Milliseconds of computation per step, of which each kernel takes 20 as the device has it."""
    warnings.simplefilter("ignore")  # of Lightning, under a newer torch
    late_device.set_delays(Delays(kernel=0.02))
    options: dict[str, Any] = {"log_every_n_steps": 2, "logger": Points(), "callbacks": [RunSummary()]}
    quiet(accelerator="late", devices=1, **options).fit(Linear(), DataLoader(TensorDataset(torch.ones(16, 8)), 4))
    return options["logger"].last()["speed/compute_ms"]


@needs_late_device
def test_what_a_device_computes_is_measured_there() -> None:
    assert late_device.run(fit_on_late_device) > 100  # the host has queued it at once


def fit_ranks() -> dict[str, float]:
    warnings.simplefilter("ignore")  # Lightning's own, and its advice for speed
    options: dict[str, Any] = {"log_every_n_steps": 10, "logger": Points(), "callbacks": [RunSummary()]}
    loader = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=2)
    quiet(strategy="ddp", devices=2, **options).fit(Tiny(4), loader)
    return options["logger"].last()


def test_under_ddp_the_time_of_communication_that_training_waits_for_is_logged() -> None:
    values, _ = run_ranks(fit_ranks, 2)
    assert values["speed/communication_ms"] >= 0  # as torch's wrapper has measured, of one step
