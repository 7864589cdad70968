"""Run a zero-weight step: a rank without samples takes part in the reduction of gradients."""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torchmetrics import Metric

from ..core.patching import replaced
from ..core.private import of_metrics, of_torch
from .sync_batchnorm import SyncedBatchNorm

_LOG_OPTIONS = list(inspect.signature(pl.LightningModule.log).parameters)[3:]  # after self, name and value
_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


@contextmanager
def zero_weight_step(module: pl.LightningModule) -> Generator[None]:
    """Run a step with weight zero: it leaves no trace.

    Buffers and metric states are restored, logged values get no weight, and what the step appended to lists of the
    module (`self.training_step_outputs.append(...)`) is removed.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [(metric, _metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    lists = [(value, len(value)) for value in vars(module).values() if type(value) is list]
    synced = [layer for layer in module.modules() if isinstance(layer, SyncedBatchNorm)]
    for layer in synced:
        layer.counts = False
    try:
        with replaced(module, "log", _weightless(module.log)):
            yield
    finally:
        for layer in synced:
            layer.counts = True
        for buffer, value in buffers:
            buffer.data.copy_(value)  # hidden from autograd: BatchNorm's backward, with weight 0 here, needs them
        for value, length in lists:
            del value[length:]
        for metric, state in metrics:
            vars(metric).update(state)


@contextmanager
def silent_step(module: pl.LightningModule) -> Generator[None]:
    """Run a step with weight zero that logs nothing: in an evaluation ranks may log different names."""
    with zero_weight_step(module), replaced(module, "log", _log_nothing):
        yield


def _log_nothing(*args: Any, **options: Any) -> None:
    """Take the place of `self.log`."""


def recompute_weights(module: nn.Module) -> None:
    """Compute the weights that torch's hooks set before each forward, on a rank that has run none.

    A rank without samples in an evaluation keeps those of the last training step's forward, made from the parameters
    before the optimizer step; `ModelPruning` would prune other weights on it.
    """
    for layer in module.modules():
        for hook in of_torch.forward_pre_hooks(layer).values():
            if isinstance(hook, (BasePruningMethod, WeightNorm)):
                hook(layer, ())


def _metric_state(metric: Metric) -> dict[str, Any]:
    counters = [name for name, value in vars(metric).items() if isinstance(value, (int, float))]  # Running has one
    values = {
        name: getattr(metric, name)
        for name in (*of_metrics.defaults(metric), *counters, of_metrics.COMPUTED, of_metrics.FORWARD_CACHE)
    }
    return {name: list(value) if isinstance(value, list) else _kept(value) for name, value in values.items()}


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _weightless(log: Callable[..., None]) -> Callable[..., None]:
    """Wrap `log` for a zero-weight batch: means get weight 0, sums 0, maxima -inf, minima +inf."""

    def log_nothing(name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(_LOG_OPTIONS, args, strict=False))
        log(name, neutral(value, options.get("reduce_fx", "mean")), **{**options, "batch_size": 0})

    return log_nothing


def neutral(value: Any, reduce_fx: Any) -> Any:
    """Replace a logged value by one that leaves the epoch's value as it is, if it is logged with `batch_size=0`.

    Args:
        value: a tensor of any dtype, which is kept, as ranks exchange values by dtype; a number; or a metric.
        reduce_fx: as given to `self.log`.
    """
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    number = _NEUTRAL.get(kind, 0.0)
    if isinstance(value, Tensor):
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        return torch.full_like(value.detach(), number, dtype=dtype)
    return number if isinstance(value, (int, float)) else value
