"""Measure seconds and bytes of each chunk of a step, without synchronizing any device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.devices import current_stream, is_accelerator


@dataclass
class Reading:
    """Time and memory of one chunk on its device.

    Args:
        seconds: duration of the forward pass.
        saved_bytes: size of all tensors saved for backward, the memory that grows with samples.
    """

    seconds: float = 0.0
    saved_bytes: float = 0.0
    _events: tuple[torch.Event, torch.Event] | None = field(default=None, repr=False)

    def is_ready(self) -> bool:
        """Whether the device has finished the chunk, so that `seconds` is known."""
        if self._events is None:
            return True
        start, end = self._events
        if not end.query():
            return False
        self.seconds, self._events = start.elapsed_time(end) / 1000, None
        return True

    def of(self, call: Callable[[], Any], device: torch.device, parameters: Sequence[Tensor] | None) -> Any:
        """Run a call and measure it.

        Args:
            call: the work of the chunk.
            parameters: parameters of the replica, which do not count as its memory; None skips the measurement of
                memory, which costs a Python call per saved tensor.
        """
        if parameters is None:
            return self._timed(call, device)
        seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.saved_bytes += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            return self._timed(call, device)

    def _timed(self, call: Callable[[], Any], device: torch.device) -> Any:
        if is_accelerator(device):
            start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            start.record(current_stream(device))
            result = call()
            end.record(current_stream(device))
            self._events = (start, end)
            return result
        start_s = time.perf_counter()
        result = call()
        self.seconds = time.perf_counter() - start_s
        return result


@dataclass
class Measurement:
    """The readings of one step.

    Args:
        memory: whether bytes are counted.
        sizes: samples per device; empty until the step has run.
        readings: one per device.
    """

    memory: bool
    sizes: list[int] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def is_ready(self) -> bool:
        """Whether the step has run and every device has finished its chunk."""
        return bool(self.sizes) and all(reading.is_ready() for reading in self.readings)
