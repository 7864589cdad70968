"""Metrics of every kind, and how a step updates and logs them."""

from collections.abc import Callable
from typing import Any

import torchmetrics as tm
from torch import Tensor, nn
from torchmetrics.wrappers import Running

K: dict[str, Any] = {"task": "multiclass", "num_classes": 3}


def _accuracy() -> Any:
    return tm.Accuracy(**K)


def _macro(kind: Any) -> Any:
    return kind(**K, average="macro")


def _f1() -> Any:
    precision, recall = _macro(tm.Precision), _macro(tm.Recall)
    return 2 * precision * recall / (precision + recall + 1e-9)


def _collection(**options: Any) -> Any:
    return tm.MetricCollection({"a": _accuracy(), "p": _macro(tm.Precision), "r": _macro(tm.Recall)}, **options)


OF_PREDICTIONS: dict[str, Callable[[], Any]] = {
    "accuracy": _accuracy,
    "f1": lambda: tm.F1Score(**K, average="macro"),
    "auroc": lambda: tm.AUROC(**K),
    "average_precision": lambda: tm.AveragePrecision(**K),
    "kappa": lambda: tm.CohenKappa(**K),
    "calibration": lambda: tm.CalibrationError(**K, n_bins=4),
    "composition": _f1,
    "composition_constant": lambda: _accuracy() + 1.0,
    "composition_abs": lambda: abs(_macro(tm.Precision) - _macro(tm.Recall)),
    "collection": _collection,
    "collection_groups": lambda: _collection(compute_groups=[["p", "r"], ["a"]]),
    "collection_nested": lambda: tm.MetricCollection([_collection(), tm.CohenKappa(**K)], prefix="nested_"),
    "running": lambda: Running(_accuracy(), window=2),
    "minmax": lambda: tm.MinMaxMetric(_accuracy()),
    "classwise": lambda: tm.ClasswiseWrapper(tm.Accuracy(**K, average=None)),
}
OF_VALUES: dict[str, Callable[[], Any]] = {
    "mean_metric": tm.MeanMetric,
    "sum_metric": tm.SumMetric,
    "max_metric": tm.MaxMetric,
    "running_mean": lambda: tm.RunningMean(window=3),
    "running_sum": lambda: tm.RunningSum(window=2),
}
OF_REGRESSION: dict[str, Callable[[], Any]] = {
    "mse": tm.MeanSquaredError,
    "pearson": tm.PearsonCorrCoef,
    "r2": tm.R2Score,
    "spearman": tm.SpearmanCorrCoef,
    "explained": tm.ExplainedVariance,
    "weighted_mean": tm.MeanMetric,
}
METRICS = {**OF_PREDICTIONS, **OF_VALUES, **OF_REGRESSION}
STYLES = ("object", "update", "value", "epoch_end", "epoch_start_reset")
VALUE_STYLE = ("accuracy", "mean_metric", "mse")
"""Metrics whose value of a batch is a mean over samples, so that a step may log it as a number."""


WHOLE_ONLY = ("minmax", "classwise")
"""Metrics whose value is a dict, which `self.log` doesn't take: logged when the epoch ends."""


def arguments(name: str, logits: Tensor, y: Tensor, losses: Tensor) -> tuple[Any, ...]:
    """What a metric is updated with."""
    if name in OF_PREDICTIONS:
        return logits.detach().softmax(-1), y
    if name in OF_VALUES:
        return (losses.detach(),)
    if name == "weighted_mean":
        return losses.detach(), 1.0 + y
    return logits.detach()[:, 0].contiguous(), y.to(logits.dtype)


def make_tracker() -> Any:
    """A tracker of two metrics over epochs."""
    return tm.MetricTracker(tm.MetricCollection({"a": _accuracy(), "p": _macro(tm.Precision)}), maximize=[True, True])


def make_metrics(logs: list[Any]) -> nn.ModuleList:
    """One metric per call of `self.log`; a stand-in where it logs no metric."""
    return nn.ModuleList([METRICS[log.value]() if log.value in METRICS else nn.Identity() for log in logs])
