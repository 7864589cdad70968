"""Copy the tensors of a state to host memory that is used again, so that copying allocates none.

The first write to fresh memory costs more than the copy itself. Memory for tensors on accelerators is page-locked, so
that all copies run concurrently.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...strategies.core.devices import flat_bytes, has_streams
from ...strategies.sharding.whole import map_tensors

_SMALLEST = 1024
"""Bytes from which a tensor on the host has memory that is used again."""


class HostMemory:
    """Memory to which one state after another is copied."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def take(self, state: Any) -> Any:
        """Copy all tensors of nested dicts, lists and tuples; the copy is valid until the next call."""
        copies: dict[tuple[Any, ...], Tensor] = {}
        placed: list[Tensor] = []
        devices: set[torch.device] = set()

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if isinstance(tensor, DTensor):  # a shard, of a moving average say: it stays one
                return tensor.clone()
            if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
                return tensor.cpu().clone()
            same = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if same in copies:
                return copies[same]
            if tensor.is_cpu and tensor.nbytes < _SMALLEST:
                copies[same] = tensor.clone()
                return copies[same]
            copies[same] = target = self._place(len(placed), tensor)
            placed.append(target)
            if tensor.is_cpu and tensor.is_contiguous():
                values: Any = flat_bytes(tensor).numpy()  # torch's own copy waits for the slowest of its threads
                np.copyto(flat_bytes(target).numpy(), values)
            else:
                target.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
            return target

        copied = map_tensors(state, copy)
        for device in devices - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)
        return copied

    def _place(self, index: int, tensor: Tensor) -> Tensor:
        """The memory of a tensor, which is new if the state before had another one in its place."""
        alike = torch.empty_like(tensor, device="meta")  # whose elements fill a stretch of memory
        if index < len(self._memory):
            held = self._memory[index]
            if (held.shape, held.stride(), held.dtype) == (alike.shape, alike.stride(), alike.dtype):
                return held
            del self._memory[index:]
        with torch.inference_mode(False):  # in which a hook of a validation may save
            made = torch.empty_strided(
                alike.shape, alike.stride(), dtype=alike.dtype, pin_memory=has_streams(tensor.device)
            )
        self._memory.append(made)
        return made
