"""Run a zero-weight step: a rank without samples takes part in the reduction of gradients."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from ..core.patching import replaced
from .sync_batchnorm import SyncedBatchNorm

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


@contextmanager
def zero_weight_step(module: pl.LightningModule) -> Generator[None]:
    """Run a step with weight zero: restores buffers and metric states, and gives logged values no weight."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [(metric, _metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)]
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
        for metric, state in metrics:
            vars(metric).update(state)


def _metric_state(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    values = {name: getattr(metric, name) for name in names}
    return {name: list(value) if isinstance(value, list) else _kept(value) for name, value in values.items()}


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _weightless(log: Callable[..., None]) -> Callable[..., None]:
    """Wrap `log` for a zero-weight batch: means get weight 0, sums 0, maxima -inf, minima +inf."""

    def log_nothing(name: str, value: Any, *args: Any, **options: Any) -> None:
        reduce_fx = options.get("reduce_fx", "mean")
        kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        if not isinstance(value, Metric):
            value = torch.full_like(torch.as_tensor(value, dtype=torch.get_default_dtype()), _NEUTRAL.get(kind, 0.0))
        log(name, value, *args, **{**options, "batch_size": 0})

    return log_nothing
