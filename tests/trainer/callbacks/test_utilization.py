"""Operations are counted on fake tensors, once, and leave no trace in the module."""

import logging
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from tiny import Points, Tiny, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evener.examples.char_lm import CharLM
from evener.examples.stdlib_text import VOCABULARY_SIZE
from evener.trainer.callbacks import RunSummary, Utilization
from evener.trainer.callbacks.step_times import count_flops, known_peak_tflops


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


def test_utilization_is_operations_per_second_over_the_peak() -> None:
    module = Linear()
    utilization, seen = fit(module)
    # per sample 2 · 8 · 16 forward, and the same for the gradient of the weights; the input needs none
    assert utilization.flops_per_sample == 2 * 2 * 8 * 16
    assert seen["speed/tflops"] == pytest.approx(512 * seen["speed/samples_per_s"] / 1e12)
    assert seen["speed/utilization"] == pytest.approx(seen["speed/tflops"] / 2.0)
    assert module.num_steps == 6


def test_a_step_that_reads_values_is_not_counted_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "evener.trainer.callbacks.step_times"):
        utilization, seen = fit(Reads())
    assert utilization.flops_per_sample is None
    assert "speed/tflops" not in seen
    assert "can't be counted without values" in caplog.text


def test_the_peak_of_a_known_device_is_looked_up_and_of_another_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    assert known_peak_tflops(torch.device("cuda"), "bf16-mixed") == 312
    assert known_peak_tflops(torch.device("cpu"), "64-true") is None
