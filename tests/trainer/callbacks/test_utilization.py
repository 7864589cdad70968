"""Operations are counted on fake tensors, once, and leave no trace in the module."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evener.examples.char_lm import CharLM
from evener.examples.stdlib_text import VOCABULARY_SIZE
from evener.trainer import Trainer
from evener.trainer.callbacks import RunSummary, Utilization
from evener.trainer.callbacks.step_times import StepClock
from evener.trainer.callbacks.utilization import count_flops, peak_flops


@pytest.mark.parametrize("size", [{}, {"width": 128, "num_blocks": 2, "num_heads": 8}])
def test_the_count_of_char_lm_is_within_two_percent_of_the_formula(size: dict[str, int]) -> None:
    module = CharLM(**size)
    width, blocks, num, length = size.get("width", 64), size.get("num_blocks", 4), 3, 33
    # forward, per token: 12 width² weights a block, two operations each; scores and their sums over all positions;
    # the head. The last character has no successor. Backward costs twice as much
    length -= 1
    forward = num * length * (blocks * (24 * width**2 + 4 * length * width) + 2 * width * VOCABULARY_SIZE)
    assert count_flops(module, torch.randint(1, VOCABULARY_SIZE, (num, length + 1))) == pytest.approx(
        3 * forward, rel=0.02
    )
    assert all(parameter.grad is None for parameter in module.parameters())


class Linear(pl.LightningModule):
    """16 × 8 weights; counts its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_steps = nn.Linear(8, 16, bias=False), 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reads(Linear):
    """Its step depends on a value."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (2.0 if batch[0].sum().item() > 0 else 1.0)


class Values(pl.loggers.logger.DummyLogger):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen |= metrics


def fit(module: pl.LightningModule) -> tuple[Utilization, dict[str, float]]:
    utilization, values = Utilization(peak_tflops=2.0), Values()
    trainer = Trainer(
        strategy="single_device", accelerator="cpu", max_epochs=1, log_every_n_steps=2, logger=values,
        callbacks=[RunSummary(), utilization], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(24, 8)), batch_size=4))
    return utilization, values.seen


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


def test_a_step_is_split_into_forward_backward_and_update() -> None:
    module, seen, summary = Takes(), Values(), RunSummary()
    summary.clock = StepClock(lambda: module.now_s)
    trainer = Trainer(
        strategy="single_device", accelerator="cpu", max_epochs=1, log_every_n_steps=2, logger=seen,
        callbacks=[summary, Utilization(peak_tflops=2.0)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4))
    # two batches per optimizer step; Lightning zeroes the gradients at the first, and the update comes at the last
    parts = [seen.seen[f"speed/{name}_ms"] for name in ("forward", "backward", "optimizer")]
    assert parts == pytest.approx([1000 * (1 + 8 + 1), 1000 * 4, 1000 * 4])


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


def test_the_peak_of_a_known_device_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    device: Any = SimpleNamespace(type="cuda")
    assert peak_flops(device, "bf16-mixed") == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_flops(device, "16-true") == 756e12


def test_another_device_is_measured() -> None:
    assert 1e8 < peak_flops(torch.device("cpu"), "32-true") < 1e14
