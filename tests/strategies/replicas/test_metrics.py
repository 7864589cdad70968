"""Metrics are one device's under replicas and micro-batches, whatever their states are and is asked of them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics as tm
from parity import CLASSES, Case, Net, fit, make_trainer
from torch import Tensor, nn
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchmetrics.wrappers import Running

from evener.strategies import (
    BalancedDataParallelStrategy,
    ConfigError,
    DataParallelStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.strategies.core.module_checks import verify_takes_parts

STRATEGIES = [
    DataParallelStrategy,
    lambda: BalancedDataParallelStrategy(gpu0_chunk=0),
    lambda: DataParallelStrategy(threads=True),
]

CUTTING = [*((strategy, 3) for strategy in STRATEGIES), (lambda: ModelParallelStrategy(num_microbatches=2), 2)]


def precision() -> Any:
    return tm.Precision("multiclass", num_classes=CLASSES, average="macro")


def recall() -> Any:
    return tm.Recall("multiclass", num_classes=CLASSES, average="macro")


def accuracy(**options: Any) -> Any:
    return tm.Accuracy("multiclass", num_classes=CLASSES, **options)


def of_tokens(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over something that samples have different numbers of, and their number."""
    num = y.to(out.dtype) + 1
    return (nn.functional.cross_entropy(out, y, reduction="none") * num).sum() / num.sum(), num.sum()


class Measured(Net):
    """Feeds one metric, by `update` or `forward`, and keeps its values of every step and epoch."""

    def __init__(self, make: Callable[[], Any], feed: Callable[[Any, Tensor, Tensor], Any], by_forward: bool) -> None:
        super().__init__()
        self.metric: Any = make()
        self.feed, self.by_forward = feed, by_forward
        self.values: list[Any] = []

    def measure(self, batch: Any) -> Tensor:
        out = self(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        (self.metric if self.by_forward else self.metric.update)(*self.feed(out, batch[1], loss))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.measure(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.measure(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    def on_train_epoch_start(self) -> None:
        self.metric.reset()

    on_validation_epoch_start = on_train_epoch_start

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.by_forward:
            self.values.append(getattr(self.metric, "_forward_cache", None))
        self.values.append(self.metric.compute())

    def on_validation_epoch_end(self) -> None:
        self.values.append(self.metric.compute())
        self.metric.reset()

    on_test_epoch_end = on_validation_epoch_end


FED: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor, Tensor], Any]]] = {
    "f1": (lambda: 2 * precision() * recall() / (precision() + recall() + 1e-9), lambda out, y, loss: (out, y)),
    "running mean of tokens": (lambda: tm.RunningMean(2), lambda out, y, loss: of_tokens(out, y)),
    "mean": (tm.MeanMetric, lambda out, y, loss: (loss,)),
    "mean of tokens": (tm.MeanMetric, lambda out, y, loss: of_tokens(out, y)),
    # MaxMetric had the mean of the parts' maxima
    "max of one number per part": (tm.MaxMetric, lambda out, y, loss: (out.max(),)),
    "thresholds": (  # a metric with buffers was copied with its stage's hooks
        lambda: tm.AUROC("multiclass", num_classes=CLASSES, thresholds=5),
        lambda out, y, loss: (out.softmax(1), y),
    ),
    "ssim": (  # whose range is that of all samples
        lambda: StructuralSimilarityIndexMeasure(kernel_size=3, sigma=0.5),
        lambda out, y, loss: tuple(x[..., None].expand(-1, 1, 3, 5) * 1.0 for x in (out[:, None], y[:, None, None])),
    ),
    "collection": (
        lambda: tm.MetricCollection(
            {"a": accuracy(), "b": Running(recall(), 2), "c": tm.CohenKappa("multiclass", num_classes=CLASSES)}
        ),
        lambda out, y, loss: (out, y),
    ),
}


def measured(strategy: Any, devices: int, *args: Any) -> list[Any]:
    torch.manual_seed(3)
    case = Case()
    module = Measured(*args).double()
    torch.manual_seed(5)
    make_trainer(case, strategy, devices=devices).fit(module, case.loader(), case.loader())
    return module.values


@functools.cache
def on_one_device(*args: Any) -> list[Any]:
    return measured(SingleDeviceStrategy(), 1, *args)


@pytest.mark.parametrize(("strategy", "devices"), [CUTTING[0], CUTTING[-1]])
@pytest.mark.parametrize("by_forward", [False, True])
@pytest.mark.parametrize("name", FED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_metrics_count_in_parts_is_one_devices(name: str, by_forward: bool, strategy: Any, devices: int) -> None:
    """`Running(Accuracy, 2)` gave 0.0 instead of 0.4, `RunningMean` nan; others were refused after the first epoch."""
    expected = on_one_device(*FED[name], by_forward)
    found = measured(strategy(), devices, *FED[name], by_forward)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, check_dtype=False, equal_nan=True)


def both(make: Callable[[], Any], strategy: Any, devices: int, num: int = 10, **options: Any) -> list[Any]:
    """The module after a fit with a strategy, and after one on one device."""
    found = []
    for used, count in ((strategy, devices), (SingleDeviceStrategy(), 1)):
        torch.manual_seed(3)
        case, module = Case(num=num), make().double()
        fit(case, module, used, count, **options)
        found.append(module)
    return found


class Composed(Net):
    """Feeds and logs a composition, and another one's parts, which are registered by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.r = precision(), recall()
        self.f = 2 * self.p * self.r / (self.p + self.r + 1e-9)
        self.whole = precision() * recall()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.p(out, batch[1])
        self.r.update(out, batch[1])
        self.whole(out, batch[1])
        self.log_dict({"p": self.p, "whole": self.whole}, on_step=True, on_epoch=True)
        self.log("r", self.r)
        self.log("sum", batch[1].sum().float(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("max", out.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("f", self.f.compute())


@pytest.mark.parametrize(("strategy", "devices"), CUTTING)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_logged_of_metrics_equals_one_device(strategy: Any, devices: int) -> None:
    """A composition that was merely registered had its parts counted twice: 0.625 instead of 0.436."""
    logged = [
        {key: float(value) for key, value in one.trainer.callback_metrics.items()}
        for one in both(Composed, strategy(), devices, 11)
    ]
    assert logged[0] == pytest.approx(logged[1], abs=1e-6)


class Feeds(Net):
    """Feeds its metric in training, in some way."""

    def __init__(self, metric: Any, feed: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.metric, self.feed = metric, feed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.feed(self.metric, self(batch[0]), batch[1])
        return self.loss(batch)


@pytest.mark.parametrize(
    ("make", "feed", "told"),
    [
        (tm.SumMetric, lambda m, out, y: m.update(out.sum()), True),
        (tm.SumMetric, lambda m, out, y: m.update(1), False),
        (tm.MeanMetric, lambda m, out, y: m.update(m(out.mean()) + m.compute()), True),
        (accuracy, lambda m, out, y: (m.reset(), m.update(out, y)), True),
        (tm.MeanMetric, lambda m, out, y: m.update(out.mean()) if len(y) == 2 else None, True),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_does_not_follow_from_parts_is_counted_on_whole_batches(
    make: Any, feed: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = both(lambda: Feeds(make(), feed), DataParallelStrategy(), 3, 9, limit_val_batches=0)
    values = [module.metric.compute() for module in found]
    torch.testing.assert_close(*values, rtol=0, atol=1e-6, equal_nan=True)
    assert ("So training_step gets whole batches" in caplog.text) is told


class Forwards(Net):
    """Logs, returns and keeps what metrics return, and calls one only where it has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = tm.AUROC("multiclass", num_classes=CLASSES)
        self.both = tm.MetricCollection({"p": precision(), "r": recall()}, prefix="of_")
        self.some, self.mean, self.largest = accuracy(), tm.MeanMetric(), tm.MaxMetric()
        self.outs: list[Any] = []
        self.values: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        out, y = self(batch[0]), batch[1]
        value = self.auroc(out, y)
        self.log("auroc", value, on_step=True, on_epoch=True)
        counts = y > 0
        loss = (nn.functional.cross_entropy(out, y, reduction="none") * counts).sum() / counts.sum().clamp(min=1)
        self.mean(loss)
        self.largest.update(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        if (y > 1).any():
            self.some(out[y > 1], y[y > 1])
        return {"loss": loss, "auroc": value}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        self.values.append({name: float(value) for name, value in outputs.items()})

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        out, y = self(batch[0]), batch[1]
        value = self.auroc(out, y)
        self.log_dict(self.both(out, y))
        self.outs.append(value)
        return {"auroc": value}

    def on_validation_epoch_end(self) -> None:
        self.values.append([float(value) for value in self.outs])
        self.outs.clear()

    def on_train_epoch_end(self) -> None:
        self.values += [float(metric.compute()) for metric in (self.some, self.largest)]


@pytest.mark.parametrize(("strategy", "devices"), CUTTING)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_metrics_return_in_parts_is_the_batchs(
    strategy: Any, devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    """AUROC took the logits of a part of one sample for probabilities, in silence."""
    found = [module.values for module in both(Forwards, strategy(), devices, 11)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
    assert "whole batches" not in caplog.text


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        (StructuralSimilarityIndexMeasure(), r"takes its range .*data_range=None\). Pass data_range="),
        (tm.classification.BinaryFairness(num_groups=2), "takes its groups from the samples of each update"),
    ],
)
def test_ranks_refuse_metrics_that_read_all_samples_of_a_batch(metric: Any, why: str) -> None:
    module: Any = nn.Module()
    module.measure = nn.ModuleList([metric, StructuralSimilarityIndexMeasure(data_range=1.0)])
    with pytest.raises(ConfigError, match=rf"ddp: {type(metric).__name__} \(measure.0\) {why}"):
        verify_takes_parts(module, "ddp")


@pytest.mark.parametrize("by_forward", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_metric_that_was_reset_in_a_test_goes_on(by_forward: bool) -> None:
    """States that were reset in inference mode could not be written to outside of it: a second test failed."""
    values: list[Any] = []
    for used, devices in ((DataParallelStrategy(), 3), (SingleDeviceStrategy(), 1)):
        torch.manual_seed(3)
        module = Measured(*FED["collection"], by_forward).double()
        case = Case(num=10, trainer={"max_epochs": 1, "inference_mode": devices > 1})
        trainer = make_trainer(case, used, devices=devices)
        for _ in range(2):
            trainer.test(module, case.loader(), verbose=False)
        trainer.fit(module, case.loader(), case.loader())
        values.append(module.values)
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-6, check_dtype=False, equal_nan=True)
