"""Keep the tensors of a checkpoint in two files of memory, which are written in turns.

    snapshot.ckpt   the state, with places in the stead of tensors, and the name of the file that they are in
    tensors-…-0     ● in use          ○ written next
    tensors-…-1     ○ written next    ● in use

The file that the checkpoint names is never written to, so a process that is killed at any time leaves one that is
whole. Each tensor is copied once, to where it stays: without an archive, and without a digest of bytes that never leave
memory.
"""

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...strategies.sharding.placed import ALIGNMENT, PLACE
from ...strategies.sharding.whole import map_tensors
from ._snapshot import copy_tensors, identity, is_strided

FILE = "evener_tensors"
"""The key of a checkpoint with the name of the file that has its tensors."""
_SMALLEST = 1024
"""Bytes from which a tensor is put into the file; a smaller one stays in the checkpoint."""


class TensorFiles:
    """The two files of a process, in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"tensors-{time.time_ns()}"  # not that of an earlier process, whose file may be in use
        self._turn = 0
        self._buffers: dict[int, Tensor] = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy a checkpoint's tensors to the file that is not in use; returns it with their places, to be written."""
        self._turn = 1 - self._turn
        found: dict[tuple[Any, ...], tuple[Tensor, int]] = {}
        end = 0

        def place(tensor: Tensor) -> Any:
            nonlocal end
            tensor = tensor.detach()
            num_bytes = _num_bytes(tensor.dtype, tensor.shape)
            if num_bytes < _SMALLEST or not _is_dense(tensor):
                return tensor
            same = identity(tensor)  # one that occurs several times has one place
            if same not in found:
                found[same] = tensor, end
                end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            dtype = str(tensor.dtype).removeprefix("torch.")
            return {PLACE: [found[same][1], dtype, list(tensor.shape), list(tensor.stride())]}

        placed: dict[str, Any] = map_tensors(state, place)
        buffer = self._buffer(max(end, 1))
        copy_tensors(
            (tensor, _view(buffer, start, tensor.dtype, tensor.shape, tensor.stride()))
            for tensor, start in found.values()
        )
        return {**placed, FILE: self._file().name}

    def remove_others(self) -> None:
        """Remove the files of earlier processes, once the checkpoint names one of this process."""
        for path in self._directory.glob("tensors-*"):
            if not path.name.startswith(self._name):
                path.unlink()

    def _file(self) -> Path:
        return self._directory / f"{self._name}-{self._turn}"

    def _buffer(self, num_bytes: int) -> Tensor:
        held = self._buffers.pop(self._turn, None)
        if held is None or held.numel() < num_bytes:
            with open(self._file(), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # writing to a mapping beyond the memory is fatal
            held = torch.from_file(str(self._file()), shared=True, size=num_bytes, dtype=torch.uint8)
        self._buffers[self._turn] = held
        return held


def with_tensors(checkpoint: dict[str, Any], directory: Path, mapped: Collection[str] = ()) -> dict[str, Any]:
    """Replace the places of tensors by copies; those of `mapped` entries stay in the file until they are used."""
    if FILE not in checkpoint:
        return checkpoint
    file = directory / Path(checkpoint[FILE]).name
    buffer = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    found: dict[int, Tensor] = {}

    def view(start: int, dtype: str, shape: list[int], stride: list[int]) -> Tensor:
        return _view(buffer, start, getattr(torch, dtype), shape, stride)

    def copy(start: int, *kind: Any) -> Tensor:
        if start not in found:
            found[start] = view(start, *kind).clone(memory_format=torch.preserve_format)
        return found[start]

    return {key: _filled(value, view if key in mapped else copy) for key, value in checkpoint.items() if key != FILE}


def has_tensors(directory: Path) -> bool:
    """Whether there are files of tensors."""
    return any(directory.glob("tensors-*"))


def _filled(tree: Any, read: Callable[..., Tensor]) -> Any:
    if isinstance(tree, dict):
        if PLACE in tree:
            return read(*tree[PLACE])
        return type(tree)((key, _filled(value, read)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_filled(value, read) for value in tree)
    return tree


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order."""
    if not is_strided(tensor):
        return False
    span = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return span == tensor.numel() and not tensor.is_quantized


def _num_bytes(dtype: torch.dtype, shape: Any) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _view(buffer: Tensor, start: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    flat = buffer[start : start + _num_bytes(dtype, shape)].view(dtype)
    return flat.as_strided(list(shape), list(stride), flat.storage_offset())
