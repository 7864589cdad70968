"""Measure seconds and bytes of each chunk of a step, without synchronizing any device."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.devices import seconds_between, time_mark


@dataclass
class Reading:
    """Time and memory of one chunk on its device."""

    seconds: float = 0.0
    """Of its forward pass."""
    saved_bytes: float = 0.0
    """Of all tensors saved for backward, the memory that grows with samples."""
    _marks: tuple[Any, Any] | None = field(default=None, repr=False)

    def is_ready(self) -> bool:
        """Whether the device has finished the chunk, so that `seconds` is known."""
        if self._marks is not None:
            start, end = self._marks
            if isinstance(end, torch.Event) and not end.query():
                return False
            self.seconds, self._marks = seconds_between(start, end), None
        return True

    def of(self, call: Callable[[], Any], device: torch.device, parameters: Sequence[Tensor] | None) -> Any:
        """Run a call and measure it.

        Args:
            parameters: those of the replica, which do not count as its memory; None skips the measurement of memory,
                which costs a Python call per saved tensor.
        """
        seen = {parameter.untyped_storage().data_ptr() for parameter in parameters or ()}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.saved_bytes += storage.nbytes()
            return tensor

        counting = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with nullcontext() if parameters is None else counting:
            start = time_mark(device)
            result = call()
            self._marks = start, time_mark(device)
        return result


@dataclass
class Measurement:
    """The readings of one step, one per device; `memory` tells whether bytes are counted, `sizes` are samples."""

    memory: bool
    sizes: list[int] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def is_ready(self) -> bool:
        """Whether the step has run and every device has finished its chunk."""
        return bool(self.sizes) and all(reading.is_ready() for reading in self.readings)
