"""Copy nested tensors to host memory into reused buffers, so that copying allocates no memory."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PIECE = 2**21
"""Bytes that a thread copies at a time."""
_MAX_THREADS = 4


class Snapshot:
    """Copies the same nested tensors repeatedly into the same buffers.

    The first write to fresh memory costs more than the copy itself. Buffers for tensors on accelerators are
    page-locked, so that all copies run concurrently.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._used: dict[tuple[Any, ...], Tensor] = {}
        self._seen: dict[tuple[Any, ...], Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def take(self, tree: Any) -> Any:
        """Copy all tensors of nested dicts, lists and tuples to the host.

        The copy is valid until the next call. A tensor that occurs several times is copied once and stays shared.
        """
        self._used, self._seen, self._copies = {}, {}, []
        copy = self._copy(tree, ())
        copy_tensors(self._copies)
        self._buffers, self._seen, self._copies = self._used, {}, []
        return copy

    def _copy(self, tree: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(tree, Tensor):
            return self._copy_tensor(tree.detach(), path)
        if isinstance(tree, dict):
            return type(tree)((key, self._copy(value, (*path, key))) for key, value in tree.items())
        if type(tree) in (list, tuple):
            return type(tree)(self._copy(value, (*path, i)) for i, value in enumerate(tree))
        return tree

    def _copy_tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
            return tensor.cpu().clone()
        same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and same in self._seen:
            return self._seen[same]
        key = (tensor.device, path, tensor.shape, tensor.stride(), tensor.dtype)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        self._copies.append((tensor, buffer))
        self._used[key] = self._seen[same] = buffer
        return buffer


def copy_tensors(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors to buffers on the host, and return when all are copied.

    Args:
        copies: each tensor with its buffer, which has the same shape and strides.
    """
    on_host: list[tuple[Any, Any]] = []
    devices: set[torch.device] = set()
    for tensor, buffer in copies:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            source, target = _bytes(tensor), _bytes(buffer)
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


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
