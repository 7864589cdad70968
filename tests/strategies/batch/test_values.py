"""Logged values that are no means over samples: parts of a batch show one device's numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from parity import Case, make_trainer
from regression import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import BalancedDataParallelStrategy, DataParallelStrategy, DDPStrategy, ModelParallelStrategy
from evener.strategies.batch.over_batch import over_batch

# 1 of the first five, and the sixth to the ninth, count: (1 + 6 + 7 + 8 + 9) / 5; by samples in [5, 4] it was 3.89
X = torch.arange(1.0, 12.0, dtype=torch.float64)
COUNTS = torch.tensor([1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0], dtype=torch.float64)
CLASSES = torch.tensor([0, 1, -100, 2, 0, 1, -100, -100, 2, 1, 0])
LOGITS = torch.stack([X.sin(), X.cos(), (2 * X).sin()], 1)
DATA = TensorDataset(X, COUNTS, LOGITS, CLASSES)

Value = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def masked(x: Tensor, counts: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    return (x * counts).sum() / counts.sum()


def smoothed(x: Tensor, counts: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits, classes, weight=torch.tensor([1.0, 2, 3], dtype=x.dtype), label_smoothing=0.1)


def of_positives(x: Tensor, counts: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    return x[classes == 1].sum() / (classes == 1).sum().clamp(min=1) + 0.1 * x.sum()


def if_any(x: Tensor, counts: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    loss = masked(x, counts, logits, classes)
    if (classes == 2).any():
        loss = loss + 0.5 * x[classes == 2].mean()
    return loss


def macro_f1(x: Tensor, counts: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    found, wanted = F.one_hot(logits.argmax(1), 3), F.one_hot(classes.clamp(min=0), 3)
    return (2 * (found * wanted).sum(0) / (found + wanted).sum(0)).mean()


def as_number(x: Tensor, counts: Tensor, logits: Tensor, classes: Tensor) -> float:
    return F.mse_loss(x, counts).sqrt().item()


def largest(x: Tensor, counts: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    return x.max()


VALUES: list[Value] = [smoothed, of_positives, if_any, macro_f1, as_number, largest]


class Masked(pl.LightningModule):
    """Logs the mean of the values that count, times weights of 1, and other numbers of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)))
        for layer in self.net:
            nn.init.ones_(layer.weight)

    def _values(self, batch: Any, stage: str) -> Tensor:
        mean = masked(self.net(batch[0][:, None])[:, 0], *batch[1:])
        self.log(f"{stage}_mean", mean, on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_root", mean.detach().sqrt().item(), on_step=False, on_epoch=True, sync_dist=True)
        return mean

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._values(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._values(batch, "val")
        self.log_dict({value.__name__: value(*batch) for value in VALUES}, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def logged(strategy: Any, devices: int) -> dict[str, float]:
    """What one epoch logs over batches of nine samples and of two, of which one counts: 10."""
    trainer = quiet_trainer(strategy, devices, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Masked(), DataLoader(DATA, batch_size=9), DataLoader(DATA, batch_size=9))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _verify(found: dict[str, float]) -> None:
    mean, root = (9 * 6.2 + 2 * 10) / 11, (9 * 6.2**0.5 + 2 * 10**0.5) / 11
    wanted = {"train_mean": mean, "train_root": root, "val_mean": mean, "val_root": root}
    for value in VALUES:
        first, second = (float(value(*DATA[rows])) for rows in (slice(0, 9), slice(9, 11)))
        wanted[value.__name__] = (9 * first + 2 * second) / 11
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)  # numbers are kept in float32


@pytest.mark.parametrize("cut", ["5, 4", "8, 1", "9, 0", "micro-batches"])
def test_one_process_logs_values_of_whole_batches_in_parts(cut: str) -> None:
    strategies: dict[str, Any] = {
        "5, 4": lambda **options: DataParallelStrategy(**options),
        "8, 1": lambda **options: BalancedDataParallelStrategy(weights=[8, 1], **options),
        "9, 0": lambda **options: BalancedDataParallelStrategy(weights=[1, 0], **options),
        "micro-batches": lambda **options: ModelParallelStrategy(num_microbatches=2, **options),
    }
    _verify(logged(strategies[cut](global_view=False), 2))


def _on_rank() -> dict[str, float]:
    return logged(DDPStrategy(batch_size_is="global", timeout_s=60, global_view=False), 2)


def test_ranks_log_values_of_whole_batches_in_parts() -> None:
    for found in run_ranks(_on_rank, 2, timeout_s=120):
        _verify(found)


class Median(Masked):
    """Logs a value that parts don't make, unless it is computed over the batch."""

    def __init__(self, median: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.median = median

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_median", self.median(self.net(batch[0][:, None])))


def validated_median(median: Callable[[Tensor], Tensor], **options: Any) -> float:
    trainer = make_trainer(Case(), DataParallelStrategy(**options), devices=2)
    loader = DataLoader(TensorDataset(X[:9], COUNTS[:9]), 9)
    (found,) = trainer.validate(Median(median), loader, verbose=False)
    return found["val_median"]


def test_a_value_that_parts_do_not_make_is_that_of_whole_batches_or_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert validated_median(torch.median) == 5.0  # of 1, ..., 9
    assert caplog.text.count("So validation_step gets whole batches (strategy.global_view)") == 1
    told = "dp: validation_step logs 'val_median', of which values of parts of a batch"
    with pytest.warns(UserWarning, match=told):
        validated_median(torch.median, global_view=False)


def test_a_value_over_the_batch_is_one_devices_and_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert validated_median(over_batch(torch.median)) == 5.0  # warnings fail
    assert "whole batches" not in caplog.text
