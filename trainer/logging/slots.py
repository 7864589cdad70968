"""Accumulate the values of one logged key in a slot, without repeating the checks that its first value has passed.

The first value of a key takes Lightning's full path. Further values with the same arguments from the same hook are
copied on their own device and accumulated there by the same arithmetic, bit by bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...strategies.core.devices import scalar
from ...strategies.core.private.of_lightning import ResultMetric
from ...strategies.core.private.of_metrics import COMPUTED, FORWARD_CACHE, UPDATE_COUNT, forward_cache

_KEPT = (torch.float32, torch.float64)
_EXACT = 2**24
"""Up to here whole numbers are exact in float32."""

_ON_DEVICE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {max: torch.max, min: torch.min}
"""Python's own functions read each comparison of tensors back to the host."""


class Slot:
    """The accumulator of one key.

    Args:
        metric: Lightning's metric, to which the values are written in the end.
        options: the other arguments of `self.log`.
        needs_logger: whether Lightning warns on every call if the trainer has no logger.
        shared: whether a step's value is reduced over the ranks, in place.
        tracked: whether the values of a batch are read again at its end.
    """

    def __init__(
        self, metric: ResultMetric, options: tuple[Any, ...], needs_logger: bool, shared: bool, tracked: bool
    ) -> None:
        meta = metric.meta
        self.metric = metric
        self.shared = shared
        self.options = options
        self.needs_logger = needs_logger
        # Metric.__setattr__ is a Python function; writing to the dictionary is faster
        self.state: Any = metric.__dict__
        self.is_tensor = metric.is_tensor
        self.on_step = meta.on_step
        self.step_only = meta.on_step and not meta.on_epoch
        self.is_mean, self.is_sum = meta.is_mean_reduction, meta.is_sum_reduction
        self.reduce: Callable[[Tensor, Tensor], Tensor] = _ON_DEVICE.get(meta.reduce_fx, meta.reduce_fx)
        self.copies = meta.on_step or tracked or not (self.is_mean or self.is_sum)  # the value, before it is added
        self.counts_samples = self.is_tensor and meta.on_epoch and self.is_mean
        value: Any = metric.value
        self.device = value.device
        self.last: Tensor | None = None
        """The last value, copied if the slot `copies`; None if it was a number or a metric."""
        self._samples = 0
        self._size, self._weight = 0, scalar(0.0, self.device, torch.float32)
        self._number: float | None = None
        self._dtype = torch.float32

    def add(self, value: Any, batch_size: int) -> bool:
        """Accumulate a value.

        Args:
            value: a tensor of one element, a number, or this slot's torchmetrics metric.
            batch_size: number of samples, the weight in a mean.

        Returns:
            False if the value's kind or device differs from the slot's; nothing is done then.
        """
        state = self.state
        if type(value) is Tensor:
            if value.dtype not in _KEPT or value.device != self.device or not self.is_tensor:
                return False
            copy = value.detach() if value.requires_grad else value
            if self.copies:  # since the value may be modified in place later
                copy = copy.clone()
            if copy.dim():
                if copy.numel() != 1:
                    return False
                copy = copy.squeeze()
        elif type(value) is float and self.is_tensor:
            if self.step_only and not self.shared:
                self._number, self._dtype = value, _default_dtype()  # which `64-true` sets within the step only
                copy = None
            else:
                copy = scalar(value, self.device, _default_dtype())
        elif self.is_tensor or value is not state["value"]:  # which is a metric then
            return False
        else:
            self.count(1)
            return True
        self.last = copy
        state[COMPUTED] = None
        state[UPDATE_COUNT] += 1
        state["has_reset"] = False
        if self.step_only:
            state["value"] = state[FORWARD_CACHE] = copy
        else:
            assert copy is not None
            self._accumulate(copy, batch_size)
        return True

    def count(self, num_times: int) -> None:
        """Log the slot's torchmetrics metric so many times, as it is now."""
        state = self.state
        state[COMPUTED] = None
        state[UPDATE_COUNT] += num_times
        state["has_reset"] = False
        state[FORWARD_CACHE] = forward_cache(state["value"])

    def _accumulate(self, copy: Tensor, batch_size: int) -> None:
        state = self.state
        if self.on_step:
            state[FORWARD_CACHE] = copy.clone() if self.shared else copy
        if self.is_mean:
            state["value"] = state["value"] + self._weighted(copy, batch_size)
            self._samples += batch_size
        elif self.is_sum:
            state["value"] = state["value"] + copy
        else:
            state["value"] = self.reduce(state["value"], copy)

    def _weighted(self, copy: Tensor, batch_size: Any) -> Tensor:
        """Multiply by a number of samples, kept on the device, since a product with a number takes twice as long."""
        if type(batch_size) is not int or batch_size > _EXACT:
            return copy * batch_size
        if batch_size != self._size:
            self._size, self._weight = batch_size, scalar(batch_size, self.device, torch.float32)
        return copy * self._weight

    def settle(self) -> None:
        """Write the state kept on the host, a number and a count of samples, to Lightning's metric."""
        if self._number is not None:
            if self.state["value"] is None:
                number = scalar(self._number, self.device, self._dtype)
                self.state["value"] = self.state[FORWARD_CACHE] = number
            self._number = None
        if self._samples:
            self.state["cumulated_batch_size"] = self.state["cumulated_batch_size"] + self._samples
            self._samples = 0


def _default_dtype() -> torch.dtype:
    dtype = torch.get_default_dtype()
    return dtype if dtype in _KEPT else torch.float32
