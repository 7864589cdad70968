"""Keep the tensors of a checkpoint in two files of memory, which are written in turns.

    snapshot.ckpt   the state, with tensors replaced by file offsets, and the name of the file that they are in
    tensors-…-0     ● in use          ○ written next
    tensors-…-1     ○ written next    ● in use

The file that the checkpoint names is never written to, so a process that is killed at any time leaves one that is
whole. Each tensor is copied once, to where it stays, without an archive. Training waits for that alone: the file's
checksum is computed beside it, before the checkpoint is written that names the file.
"""

import os
import time
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...strategies.sharding.placed import ALIGNMENT, PLACE
from ...strategies.sharding.whole import map_tensors
from ._shard_files import FILE, SHARDS, tensor_file
from ._snapshot import copy_tensors, identity, is_strided

_SMALLEST = 1024
"""Bytes from which a tensor is put into the file; a smaller one stays in the checkpoint."""


class TensorFiles:
    """The two files of a process, in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"tensors-{time.time_ns()}"  # not that of an earlier process, whose file may be in use
        self._turn = self._num_bytes = 0
        self._buffers: dict[int, Tensor] = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy a checkpoint's tensors to the file that is not in use; returns it with their places."""
        self._turn = 1 - self._turn
        found: dict[tuple[Any, ...], tuple[Tensor, int]] = {}
        kept: dict[tuple[Any, ...], Tensor] = {}
        end = 0

        def place(tensor: Tensor) -> Any:
            nonlocal end
            tensor = tensor.detach()
            num_bytes = _num_bytes(tensor.dtype, tensor.shape)
            if not _is_dense(tensor):
                return tensor.cpu().clone()
            same = identity(tensor)  # one that occurs several times has one place
            if num_bytes < _SMALLEST:
                return kept.setdefault(same, tensor.to("cpu", copy=True))
            if same not in found:
                found[same] = tensor, end
                end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            dtype = str(tensor.dtype).removeprefix("torch.")
            return {PLACE: [found[same][1], dtype, list(tensor.shape), list(tensor.stride())]}

        placed: dict[str, Any] = map_tensors(state, place)
        self._num_bytes, buffer = end, self._buffer(max(end, 1))
        copy_tensors(
            (tensor, _view(buffer, start, tensor.dtype, tensor.shape, tensor.stride()))
            for tensor, start in found.values()
        )
        return {**placed, FILE: self._file().name}

    def checked(self, placed: dict[str, Any]) -> dict[str, Any]:
        """Add to what `take` has returned the length and the checksum of the file, to be written."""
        content: Any = self._buffers[self._turn].numpy()[: self._num_bytes]
        layout = {"entries": [[0, 1, self._num_bytes, 1]], "num_bytes": self._num_bytes}
        return {**placed, SHARDS: {**layout, "digests": [zlib.crc32(content)]}}

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


def with_tensors(checkpoint: dict[str, Any], directory: Path, mapped: Collection[str] | None = ()) -> dict[str, Any]:
    """Replace the places of tensors by copies; those of `mapped` entries (None: all) stay in the file until used."""
    if FILE not in checkpoint:
        return checkpoint
    file = tensor_file(checkpoint, directory)
    buffer = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    found: dict[int, Tensor] = {}

    def view(start: int, dtype: str, shape: list[int], stride: list[int]) -> Tensor:
        return _view(buffer, start, _dtype(dtype), shape, stride)

    def copy(start: int, dtype: str, shape: list[int], stride: list[int]) -> Tensor:
        if start not in found:
            own = _piece(buffer, start, _dtype(dtype), shape).clone()  # as bytes: not every type can be copied
            found[start] = _view(own, 0, _dtype(dtype), shape, stride)
        return found[start]

    entries = {key: value for key, value in checkpoint.items() if key != FILE}
    return {key: _filled(value, view if mapped is None or key in mapped else copy) for key, value in entries.items()}


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


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # no attribute that imports a module
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _piece(buffer: Tensor, start: int, dtype: torch.dtype, shape: Any) -> Tensor:
    end = start + _num_bytes(dtype, shape)
    if not 0 <= start <= end <= len(buffer):
        raise EOFError("a tensor ends beyond the file")
    if start % dtype.itemsize:
        raise ValueError("a tensor begins within an element")
    return buffer[start:end]


def _view(buffer: Tensor, start: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    flat = _piece(buffer, start, dtype, shape).view(dtype)
    return flat.as_strided(list(shape), list(stride), flat.storage_offset())
