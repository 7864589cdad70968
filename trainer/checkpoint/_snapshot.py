"""Copy nested tensors to host memory into reused buffers, so that copying allocates no memory."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...strategies.core.devices import flat_bytes, has_streams
from ...strategies.sharding.whole import map_tensors

_PIECE = 2**21
"""Bytes that a thread copies at a time."""
_MAX_THREADS = 4


class Snapshot:
    """Copies the same nested tensors repeatedly into the same buffers.

    The first write to fresh memory costs more than the copy itself. Buffers for tensors on accelerators are
    page-locked, so that all copies run concurrently.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], list[Tensor]] = {}

    def take(self, tree: Any) -> Any:
        """Copy all tensors of nested dicts, lists and tuples to the host.

        The copy is valid until the next call. A tensor that occurs several times is copied once and stays shared.
        """
        free, used = self._buffers, dict[tuple[Any, ...], list[Tensor]]()
        found: dict[tuple[Any, ...], Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []

        def buffer_of(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if not is_strided(tensor):
                return tensor.cpu().clone()
            same = identity(tensor)
            if same not in found or not tensor.numel():
                kind = (tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
                kept, on_device = free.get(kind), has_streams(tensor.device)
                buffer = kept.pop() if kept else torch.empty_like(tensor, device="cpu", pin_memory=on_device)
                used.setdefault(kind, []).append(buffer)
                copies.append((tensor, buffer))
                found[same] = buffer
            return found[same]

        copy = map_tensors(tree, buffer_of)
        copy_tensors(copies)
        self._buffers = used
        return copy


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one, whose elements are in memory."""
    return type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type != "meta"


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that show the same elements of memory."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def copy_tensors(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors to buffers on the host, of the same shape and strides, and return when all are copied."""
    on_host: list[tuple[Any, Any]] = []
    devices: set[torch.device] = set()
    for tensor, buffer in copies:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            source, target = flat_bytes(tensor).numpy(), flat_bytes(buffer).numpy()
            on_host += [
                (source[start : start + _PIECE], target[start : start + _PIECE])
                for start in range(0, len(source), _PIECE)
            ]
        else:
            buffer.copy_(tensor, non_blocking=True)
            devices |= {tensor.device} - {torch.device("cpu")}
    _copy_in_threads(on_host)
    for device in devices:
        torch.accelerator.synchronize(device)


def _copy_in_threads(pieces: list[tuple[Any, Any]]) -> None:
    """Copy with several threads, since one core alone does not use all of the memory's bandwidth.

    Each takes the next piece, so that none waits for another that has to share its core. torch would cut the whole into
    one part per thread and wait for the slowest: 10 times slower on a busy machine.
    """
    remaining = iter(pieces)

    def work() -> None:
        for source, target in remaining:
            np.copyto(target, source)

    num_others = min(_MAX_THREADS, os.cpu_count() or 1, len(pieces) // 4 + 1) - 1
    with ThreadPoolExecutor(max(1, num_others)) as pool:
        others = [pool.submit(work) for _ in range(num_others)]
        work()
        for other in others:
            other.result()
