"""Copy the tensors of a state to host memory that is used again, so that copying allocates none.

The first write to fresh memory costs more than the copy itself. Memory for tensors on accelerators is page-locked, so
that all copies run concurrently.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...strategies.core.devices import flat_bytes, has_streams
from ...strategies.sharding.whole import map_tensors

_SMALLEST = 1024
"""Bytes from which a tensor on the host has memory that is used again."""
_PIECE = 2**21
"""Bytes that a thread copies at a time."""
_MAX_THREADS = 4


class HostMemory:
    """Memory to which one state after another is copied."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def take(self, state: Any) -> Any:
        """Copy all tensors of nested dicts, lists and tuples; the copy is valid until the next call."""
        copies: dict[tuple[Any, ...], Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if isinstance(tensor, DTensor):  # a shard, of a moving average say: it stays one
                return tensor.clone()
            if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
                return tensor.cpu().clone()
            same = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if same not in copies:
                if tensor.is_cpu and tensor.nbytes < _SMALLEST:
                    copies[same] = tensor.clone()
                else:
                    copies[same] = self._place(len(pairs), tensor)
                    pairs.append((tensor, copies[same]))
            return copies[same]

        copied = map_tensors(state, copy)
        _copy(pairs)
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


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors to others, and return when all are copied.

    On the host several threads copy, since one core alone does not use all of the memory's bandwidth. Each takes the
    next piece, so that none waits for another that has to share its core. torch would cut the whole into one part per
    thread and wait for the slowest: 10 times slower on a busy machine.
    """
    on_host: list[tuple[Any, Any]] = []
    devices: set[torch.device] = set()
    for tensor, target in pairs:
        if tensor.is_cpu and tensor.is_contiguous():
            pieces = zip(*(flat_bytes(each).split(_PIECE) for each in (tensor, target)), strict=True)
            on_host += [(copy.numpy(), source.numpy()) for source, copy in pieces]
        else:
            target.copy_(tensor, non_blocking=True)
            devices |= {tensor.device} - {torch.device("cpu")}
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1, len(on_host) // 4 + 1)) as pool:
        for copied in [pool.submit(np.copyto, *piece) for piece in on_host]:
            copied.result()
    for device in devices:
        torch.accelerator.synchronize(device)
