"""Logged values that are no means over samples: parts of a batch show one device's numbers."""

import pickle
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
from evener.strategies.batch.exact.values import Comparison, Seen, Tape
from evener.strategies.batch.whole.over_batch import over_batch

# 1 of the first five, and the sixth to the ninth, count: (1 + 6 + 7 + 8 + 9) / 5; by samples in [5, 4] it was 3.89
X = torch.arange(1.0, 10.0, dtype=torch.float64)
COUNTS = torch.tensor([1, 0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
CLASSES = torch.tensor([0, 1, -100, 2, 0, 1, -100, -100, 2])
LOGITS = torch.stack([X.sin(), X.cos(), (2 * X).sin()], 1)
CUTS = [[5, 4], [8, 1], [9, 0], [1, 3, 5]]

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


def rows(i: int, j: int) -> tuple[Tensor, ...]:
    return X[i:j], COUNTS[i:j], LOGITS[i:j], CLASSES[i:j]


def seen(value: Value, i: int, j: int) -> Seen:
    with torch.inference_mode(), Tape() as tape:
        found = value(*rows(i, j))
        tape.log("v", found)
    return Seen(j - i, tape)


def programs_of(value: Value) -> Any:
    return Comparison(seen(value, 0, 8), [seen(value, 0, 4), seen(value, 4, 7), seen(value, 7, 8)]).programs()


@pytest.mark.parametrize(
    "value",
    [masked, smoothed, of_positives, if_any, macro_f1, as_number, largest],
    ids=lambda one: one.__name__,
)
def test_values_of_parts_make_the_values_of_the_whole(value: Value) -> None:
    found, unknown = programs_of(value)
    assert not unknown
    program = pickle.loads(pickle.dumps(found))["v"]
    for cut in CUTS:
        parts, start = [], 0
        for size in filter(None, cut):
            with torch.inference_mode(), Tape({"v": program}) as tape:
                own = value(*rows(start, start + size))
            parts.append(tape.rows(program))
            assert program.fits(parts[-1], torch.as_tensor(own))
            start += size
        whole = float(value(*rows(0, 9)))
        assert float(program.value(program.merged(parts))) == pytest.approx(whole, rel=1e-12)


def test_a_mean_over_samples_needs_nothing_and_a_median_has_nothing() -> None:
    assert programs_of(lambda x, *_: x.mean()) == ({}, [])
    assert programs_of(lambda x, *_: x.median()) == ({}, ["v"])


def test_a_part_that_computes_something_else_does_not_fit() -> None:
    found, _ = programs_of(masked)
    with torch.inference_mode(), Tape(found) as tape:
        own = masked(*rows(0, 5)) + X[0]
    assert not found["v"].fits(tape.rows(found["v"]), own)


class Masked(pl.LightningModule):
    """Logs the mean of the values that count, times weights of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)))
        for layer in self.net:
            nn.init.ones_(layer.weight)

    def _values(self, batch: Any, stage: str) -> Tensor:
        x, counts = batch
        mean = (self.net(x[:, None])[:, 0] * counts).sum() / counts.sum()
        self.log(f"{stage}_mean", mean, on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_root", mean.detach().sqrt().item(), on_step=False, on_epoch=True, sync_dist=True)
        return mean

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._values(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._values(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def logged(strategy: Any, devices: int) -> dict[str, float]:
    """What one epoch logs over batches of nine samples and of two, of which one counts: 10."""
    data = TensorDataset(torch.cat([X, torch.tensor([10.0, 11.0]).double()]), torch.cat([COUNTS, COUNTS[:2]]))
    trainer = quiet_trainer(strategy, devices, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Masked(), DataLoader(data, batch_size=9), DataLoader(data, batch_size=9))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _verify(found: dict[str, float]) -> None:
    mean, root = (9 * 6.2 + 2 * 10) / 11, (9 * 6.2**0.5 + 2 * 10**0.5) / 11
    wanted = {"train_mean": mean, "train_root": root, "val_mean": mean, "val_root": root}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)  # numbers are kept in float32


@pytest.mark.parametrize("cut", ["5, 4", "8, 1", "9, 0", "micro-batches"])
def test_one_process_logs_values_of_whole_batches(cut: str) -> None:
    strategies: dict[str, Any] = {
        "5, 4": lambda: DataParallelStrategy(),
        "8, 1": lambda: BalancedDataParallelStrategy(weights=[8, 1]),
        "9, 0": lambda: BalancedDataParallelStrategy(weights=[1, 0]),
        "micro-batches": lambda: ModelParallelStrategy(num_microbatches=2),
    }
    _verify(logged(strategies[cut](), 2))


def _on_rank() -> dict[str, float]:
    return logged(DDPStrategy(batch_size_is="global", timeout_s=60), 2)


def test_ranks_log_values_of_whole_batches() -> None:
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
    loader = DataLoader(TensorDataset(X, COUNTS), 9)
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
