"""A slot takes the values of one logged key, without the checks that its first value has passed.

The first call of a key takes Lightning's whole path. From its second call on, with the same arguments from the same
hook, a value is copied on its own device and accumulated there by the same arithmetic, to the same bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torchmetrics import Metric

_KEPT = (torch.float32, torch.float64)


class Slot:
    """The accumulator of one key.

    Args:
        metric: Lightning's own, in which the values end up.
        options: the other arguments that `self.log` was given.
        needs_logger: whether Lightning warns, in every call, where the trainer has no logger.
    """

    def __init__(self, metric: _ResultMetric, options: tuple[Any, ...], needs_logger: bool) -> None:
        meta = metric.meta
        self.metric = metric
        self.options = options
        self.needs_logger = needs_logger
        # Metric.__setattr__ is a Python function; the dictionary itself is not
        self.state: Any = metric.__dict__
        self.is_tensor = metric.is_tensor
        self.on_step, self.on_epoch = meta.on_step, meta.on_epoch
        self.is_mean, self.is_sum = meta.is_mean_reduction, meta.is_sum_reduction
        self.reduce: Callable[[Tensor, Tensor], Tensor] = meta.reduce_fx
        self.counts_samples = self.is_tensor and self.on_epoch and self.is_mean
        value: Any = metric.value
        self.device = value.device
        self._samples = 0

    def add(self, value: Any, batch_size: int) -> bool:
        """Take a value.

        Args:
            value: a tensor of one element, a number, or the torchmetrics metric that this slot is of.
            batch_size: samples that a mean weighs it with.

        Returns:
            False where the value is of another kind or place than the slot's, and nothing was done.
        """
        if not self.is_tensor:
            return self._add_metric(value)
        copy = self._copy(value)
        if copy is None:
            return False
        state = self.state
        state["_computed"] = None
        state["_update_count"] += 1
        state["has_reset"] = False
        if self.on_step:
            state["_forward_cache"] = copy
            if not self.on_epoch:
                state["value"] = copy
                return True
        if self.is_mean:
            state["value"] = state["value"] + copy * batch_size
            self._samples += batch_size
        elif self.is_sum:
            state["value"] = state["value"] + copy
        else:
            state["value"] = self.reduce(state["value"], copy)
        return True

    def _copy(self, value: Any) -> Tensor | None:
        """Copy what may be changed in place later. None where Lightning must look at the value."""
        kind = type(value)
        if kind is float or kind is int:
            return torch.tensor(value, device=self.device, dtype=_default_dtype())
        if kind is not Tensor or value.numel() != 1 or value.device != self.device or not value.is_floating_point():
            return None
        if value.requires_grad:
            value = value.detach()
        copy = value.clone() if value.dim() == 0 else value.clone().squeeze()
        return copy if copy.dtype in _KEPT else copy.to(_default_dtype())

    def _add_metric(self, value: Any) -> bool:
        state = self.state
        if not isinstance(value, Metric) or value is not state["value"]:
            return False
        state["_computed"] = None
        state["_update_count"] += 1
        state["has_reset"] = False
        state["_forward_cache"] = value._forward_cache
        return True

    def settle(self) -> None:
        """Write the number of samples, counted on the host, into Lightning's metric."""
        if self._samples:
            self.state["cumulated_batch_size"] = self.state["cumulated_batch_size"] + self._samples
            self._samples = 0


def _default_dtype() -> torch.dtype:
    dtype = torch.get_default_dtype()
    return dtype if dtype in _KEPT else torch.float32
