"""Gradients that are not finite, of all ranks where each has a shard of them, and memory that does not suffice."""

import warnings
from pathlib import Path
from typing import Any

import late_device
import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from late_device import needs_late_device
from regression import Net, Numbered, quiet_trainer, weights
from tiny import Points, Tiny, quiet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError, FSDPStrategy, SingleDeviceStrategy
from evener.trainer.callbacks import DetectNonFinite, GradientNorm
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.trainer import DeviceOutOfMemory


class Fragile(Tiny):
    """Four steps; the batch of step 2 holds a value that makes its gradient what it is told."""

    def __init__(self, bad: float = 1.0, allocate: int = 10**9) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)
        self.bad = bad
        self.allocate = allocate
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(self.layer.weight.item())
        if len(batch[0]) > self.allocate:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has ...")
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.tensor([[1.0], [1.0], [self.bad], [1.0]])), batch_size=1)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_bad_step_is_named_and_a_large_gradient_is_not_one(bad: float) -> None:
    quiet(detect_nonfinite="raise").fit(Fragile(-1e30))
    trainer = quiet(detect_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"gradients of optimizer step 2 \(of layer\.weight\) are not finite"):
        trainer.fit(Fragile(bad))
    assert trainer.global_step == 2


def test_a_skipped_step_leaves_weights_and_momentum() -> None:
    module = Fragile(float("nan"))
    trainer = quiet(detect_nonfinite="skip_step")
    trainer.fit(module)
    # gradients of 1 and momentum 0.5: 1 - 0.25, then - 0.25 * 1.5, nothing, then - 0.25 * (1.5 / 2 + 1)
    assert module.seen == [1.0, 0.75, 0.375, 0.375]
    assert module.layer.weight.item() == 0.375 - 0.4375
    assert trainer.global_step == 4
    callback = next(cb for cb in trainer.callbacks if isinstance(cb, DetectNonFinite))
    assert callback.num_skipped == 1


def test_off_looks_at_nothing_and_an_unknown_word_is_refused() -> None:
    quiet(detect_nonfinite="off").fit(module := Fragile(float("nan")))
    assert module.layer.weight.isnan().all()
    with pytest.raises(ConfigError, match=r"Trainer: detect_nonfinite=warn is not allowed\. Give raise, skip_step"):
        quiet(detect_nonfinite="warn")


def fit_on_late_device(folder: Path) -> list[Path]:
    """Train where the host does not wait for a step; what has been saved when the first bad one is told."""
    warnings.simplefilter("ignore")  # of Lightning, under a newer torch
    trainer = quiet(accelerator="late", devices=1, detect_nonfinite="raise", callbacks=[Checkpoint(folder)])
    with pytest.raises(FloatingPointError, match="gradients of optimizer step 2 are not finite"):
        trainer.fit(Fragile(float("nan")))
    return list(folder.rglob("*.ckpt"))


@needs_late_device
def test_on_a_device_the_first_bad_step_is_told_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    assert late_device.run(fit_on_late_device, tmp_path) == []


@pytest.mark.parametrize(
    ("options", "allocate", "told"),
    [
        ({}, 0, r"on cuda:3, rank 0, in step 0: 1 samples at once(.|\n)*Make data\.batch_size smaller"),
        ({"strategy": "dp", "devices": ["cpu", "cpu"]}, 1, "on cpu, rank 0, in step 0: chunk 1 of 2, 2 of 3 samples"),
    ],
)
def test_out_of_memory_names_device_samples_and_what_to_change(
    options: dict[str, Any], allocate: int, told: str
) -> None:
    loader = DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=3 if options else 1)
    with pytest.raises(DeviceOutOfMemory, match=f"Out of memory {told}") as caught:
        quiet(**options).fit(Fragile(allocate=allocate), loader)
    assert "Tried to allocate 2.00 GiB" in str(caught.value)


class Overflowing(Net):
    """In the second step one gradient of the last layer alone is infinite: of few elements, on one rank."""

    def on_after_backward(self) -> None:
        gradient: Any = self.net[2].bias.grad
        if self.trainer.global_step == 1 and gradient is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.fill_(torch.inf)


def observed(num: int) -> tuple[list[float], Tensor]:
    """Norms of two kinds, and the weights after a training of which one step is skipped."""
    tape = Points()
    for norm_type in (2.0, torch.inf):
        pl.seed_everything(7, verbose=False)
        strategy = FSDPStrategy(batch_size_is="global", timeout_s=60) if num > 1 else SingleDeviceStrategy()
        options: dict[str, Any] = {"logger": tape, "log_every_n_steps": 1, "detect_nonfinite": "skip_step"}
        trainer = quiet_trainer(strategy, num, callbacks=[GradientNorm(norm_type)], **options)
        trainer.fit(module := Overflowing(), DataLoader(Numbered(), 6))
    return [value for _, value in tape.of("gradient/norm")], weights(module)


@pytest.mark.slow
def test_norms_and_nonfinite_gradients_are_those_of_all_shards() -> None:
    norms, skipped = observed(1)
    assert skipped.isfinite().all()
    (found, trained), (_, also) = run_ranks(observed, 2, 2, timeout_s=200)
    assert found == pytest.approx(norms, abs=1e-10)
    torch.testing.assert_close([trained, also], [skipped] * 2, rtol=0, atol=1e-10)
