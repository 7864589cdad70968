"""Copy the tensors of a state to one stretch of host memory, which is used again, so that copying allocates none.

The first write to fresh memory costs more than the copy itself. Memory for tensors on accelerators is page-locked, so
that all copies run concurrently.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...strategies.core.devices import flat_bytes, has_streams
from ...strategies.sharding.placed import ALIGNMENT, PLACE
from ...strategies.sharding.whole import map_tensors

_SMALLEST = 1024
"""Bytes from which a tensor on the host gets a place; a smaller one stays in the state."""
_PIECE = 2**21
"""Bytes that a thread copies at a time."""
_MAX_THREADS = 4
_HERE = object()
"""The key of places in this memory, where the state has places in a file, too."""


@dataclass
class LaidOut:
    """A state with places in memory instead of its tensors.

    Args:
        tensors: the tensors by their beginning, in bytes.
        num_bytes: of all of them, with the gaps between them.
    """

    state: Any = None
    tensors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    num_bytes: int = 0

    def copy_to(self, memory: Tensor) -> None:
        """Copy the tensors to their places, and return when all are copied."""
        _copy(
            (tensor, view(memory, start, tensor.dtype, tensor.shape, tensor.stride()))
            for start, tensor in self.tensors.items()
        )


def lay_out(state: Any, key: object = PLACE) -> LaidOut:
    """Give each tensor of nested dicts, lists and tuples a place; one that occurs several times has one place.

    Args:
        key: of the dicts that stand for tensors.
    """
    laid_out = LaidOut()
    places: dict[tuple[Any, ...], Any] = {}

    def place(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        if not _is_dense(tensor):
            return tensor.cpu().clone()
        same = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if same not in places:
            if tensor.is_cpu and tensor.nbytes < _SMALLEST:
                places[same] = tensor.clone()
            else:
                start, dtype = laid_out.num_bytes, str(tensor.dtype).removeprefix("torch.")
                laid_out.tensors[start] = tensor
                laid_out.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
                places[same] = {key: [start, dtype, list(tensor.shape), list(tensor.stride())]}
        return places[same]

    laid_out.state = map_tensors(state, place)
    return laid_out


class HostMemory:
    """Memory to which one state after another is copied."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, state: Any) -> Any:
        """Copy all tensors of a state; the copy is valid until the next call."""
        laid_out = lay_out(state, _HERE)
        if len(self._memory) < laid_out.num_bytes:
            locked = any(has_streams(tensor.device) for tensor in laid_out.tensors.values())
            self._memory = torch.empty(laid_out.num_bytes, dtype=torch.uint8, pin_memory=locked)
        laid_out.copy_to(self._memory)
        return filled(laid_out.state, self._own, _HERE)

    def _own(self, start: int, dtype: torch.dtype, shape: list[int], stride: list[int]) -> Tensor:
        values: Any = piece(self._memory, start, dtype, shape).numpy()
        own = torch.frombuffer(values, dtype=torch.uint8)  # a storage of its own, which is saved alone
        return view(own, 0, dtype, shape, stride)


def filled(tree: Any, read: Callable[..., Tensor], key: object = PLACE) -> Any:
    """Replace places by what `read` returns for their beginning, dtype, shape and strides; once for each place."""
    found: dict[int, Tensor] = {}

    def fill(tree: Any) -> Any:
        if isinstance(tree, dict):
            if key not in tree:
                return type(tree)((key, fill(value)) for key, value in tree.items())
            start, dtype, shape, stride = tree[key]
            if start not in found:
                found[start] = read(start, _dtype(dtype), shape, stride)
            return found[start]
        return type(tree)(map(fill, tree)) if type(tree) in (list, tuple) else tree

    return fill(tree)


def view(memory: Tensor, start: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    """The tensor at a place in memory."""
    flat = piece(memory, start, dtype, shape).view(dtype)
    return flat.as_strided(list(shape), list(stride), flat.storage_offset())


def piece(memory: Tensor, start: int, dtype: torch.dtype, shape: Any) -> Tensor:
    """The bytes of a place.

    Raises:
        EOFError: it ends beyond the memory.
        ValueError: it begins within an element.
    """
    end = start + torch.Size(shape).numel() * dtype.itemsize
    if not 0 <= start <= end <= len(memory):
        raise EOFError("a tensor ends beyond the file")
    if start % dtype.itemsize:
        raise ValueError("a tensor begins within an element")
    return memory[start:end]


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # no attribute that imports a module
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a plain tensor fill a stretch of memory, in whatever order."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    span = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return span == tensor.numel() > 0


def _copy(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    on_host: list[tuple[Any, Any]] = []
    devices: set[torch.device] = set()
    for tensor, target in copies:
        if tensor.is_cpu and tensor.is_contiguous():
            pairs = zip(*(flat_bytes(each).split(_PIECE) for each in (tensor, target)), strict=True)
            on_host += [(source.numpy(), copy.numpy()) for source, copy in pairs]
        else:
            target.copy_(tensor, non_blocking=True)
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
