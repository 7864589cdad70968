"""Write and read the tensors of checkpoints that all ranks write together, in a file of their own.

    last.ckpt   the state, with tensors replaced by file offsets, the name of the file and its checksums
    shards-…    tensor 0: rows of rank 0, rows of rank 1, …; tensor 1: …; a mark per rank, with a checksum

The first is written when the other is complete, and appears whole or not at all; the file that a checkpoint names is
never written to. So a checkpoint that exists is complete, whichever process is killed when.

torch.distributed.checkpoint is not used: its reader unpickles its metadata, and objects among the values, without
restriction, so that loading a file could run any code.
"""

import os
import socket
import struct
import time
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...strategies.core.devices import flat_bytes
from ...strategies.distributed.store import RankError
from ...strategies.sharding.placed import PLACE, Entry, Placed

FILE = "evener_tensors"
"""The key of a checkpoint with the name of the file that has its tensors."""
SHARDS = "evener_shards"
"""The key of a checkpoint with the layout of that file, and each rank's crc32."""
WEIGHTS = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")
"""Entries of which a rank keeps its shards only, or copies to its own."""
PREFIX = "shards-"
_MARK = struct.Struct("<I8s")
_WRITTEN, _FAILED = b"written.", b"failed.."
_POLL_S = 0.02


def new_name() -> str:
    """A name that no other file has, and that tells which process of which machine leads its writing."""
    return f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"


class ShardFile:
    """The file of tensors of a checkpoint, beside it; this rank makes it if it is the first."""

    def __init__(self, path: Path, placed: Placed) -> None:
        self.path = path
        self._placed = placed

    @property
    def layout(self) -> dict[str, Any]:
        """What a checkpoint must know of the file."""
        entries = [[e.start, e.num_rows, e.row_bytes, e.num_parts] for e in self._placed.entries]
        return {"entries": entries, "num_bytes": self._placed.num_bytes}

    def write(self, parts: Iterable[Tensor | None]) -> None:
        """Write this rank's rows, and its mark when they are on the disk; rank 0 learns of a failure."""
        writer = self._placed.writer
        if writer is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
            try:
                file.truncate(self._placed.num_bytes + self._placed.num_writers * _MARK.size)
                self._mark(file, writer, bytes(_MARK.size))  # takes its space, lest the disk be full for it later
                checksum = 0
                for entry, part in zip(self._placed.entries, parts, strict=True):
                    if part is not None:
                        start = entry.part(writer if entry.num_parts > 1 else 0)[0]
                        checksum = _write_rows(file, start, part, checksum)
                os.fsync(file.fileno())
                self._mark(file, writer, _MARK.pack(checksum, _WRITTEN))
            except OSError:
                with suppress(OSError):
                    self._mark(file, writer, _MARK.pack(0, _FAILED))
                raise

    def _mark(self, file: Any, writer: int, mark: bytes) -> None:
        file.seek(self._placed.num_bytes + writer * _MARK.size)
        file.write(mark)
        os.fsync(file.fileno())

    def wait(self, timeout_s: float) -> list[int]:
        """Wait until all ranks have written their rows, and return their checksums.

        Raises:
            OSError: a rank could not write.
            RankError: a rank has not answered.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with open(self.path, "rb") as file:  # opened anew: other machines' writes show then
                file.seek(self._placed.num_bytes)
                marks = list(_MARK.iter_unpack(file.read(self._placed.num_writers * _MARK.size)))
            missing = [rank for rank, (_, mark) in enumerate(marks) if mark != _WRITTEN]
            if not missing:
                return [checksum for checksum, _ in marks]
            if failed := [rank for rank in missing if marks[rank][1] == _FAILED]:
                raise OSError(f"the shards could not be written by rank {failed[0]}")
            if time.monotonic() > deadline:
                raise RankError(f"rank {missing[0]} has not written its shards of a checkpoint within {timeout_s:g} s")
            time.sleep(_POLL_S)


def _write_rows(file: Any, start: int, part: Tensor, checksum: int) -> int:
    values: Any = flat_bytes(part.cpu().contiguous()).numpy()
    data = memoryview(values)
    checksum = zlib.crc32(data, checksum)
    file.seek(start)
    while data:  # the system may write less than it is given
        data = data[file.write(data) :]
    return checksum


def with_tensors(
    checkpoint: dict[str, Any], directory: Path, mapped: Collection[str] | None, reader: int, num_readers: int
) -> dict[str, Any]:
    """Replace the places of tensors by copies, once this reader has verified its share of the ranks' rows.

    Those of `mapped` entries (None: all) stay in the file until they are used.

    Raises:
        FileNotFoundError: the file of tensors is not there.
        EOFError: it is too short.
        ValueError: a checksum does not match, or a tensor begins within an element.
    """
    if FILE not in checkpoint:
        return checkpoint
    path = directory / Path(checkpoint[FILE]).name
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}, which must lie beside it, is missing")
    memory = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    if SHARDS in checkpoint and not _is_intact(memory, checkpoint[SHARDS], reader, num_readers):
        raise ValueError(f"the checksum of {path} does not match")
    found: dict[tuple[bool, int], Tensor] = {}

    def fill(tree: Any, stays: bool) -> Any:
        if isinstance(tree, dict):
            if PLACE not in tree:
                return type(tree)((key, fill(value, stays)) for key, value in tree.items())
            key = stays, tree[PLACE][0]
            if key not in found:
                found[key] = _tensor(memory, tree[PLACE], stays)
            return found[key]
        return type(tree)(fill(value, stays) for value in tree) if type(tree) in (list, tuple) else tree

    entries = ((key, value) for key, value in checkpoint.items() if key not in (FILE, SHARDS))
    return {key: fill(value, mapped is None or key in mapped) for key, value in entries}


def _tensor(memory: Tensor, place: Any, stays: bool) -> Tensor:
    start, name, shape, stride = place
    dtype = vars(torch).get(name)  # no attribute that imports a module
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    if start % dtype.itemsize:
        raise ValueError("a tensor begins within an element")
    rows = _stretch(memory, start, torch.Size(shape).numel() * dtype.itemsize)
    flat = (rows if stays else rows.clone()).view(dtype)  # copied as bytes: not every type can be
    return flat.as_strided(list(shape), list(stride), flat.storage_offset())


def _is_intact(memory: Tensor, layout: Any, reader: int, num_readers: int) -> bool:
    """Compare rows with the checksums of the ranks that wrote them; each of several readers takes some ranks."""
    entries = [Entry(*entry) for entry in layout["entries"]]
    for writer in range(reader, len(layout["digests"]), num_readers):
        parts = [entry.part(writer) for entry in entries if entry.num_parts > 1 or writer == 0]
        rows: list[Any] = [_stretch(memory, *part).numpy() for part in parts]
        checksum, expected = reduce(lambda crc, each: zlib.crc32(each, crc), rows, 0), layout["digests"][writer]
        if checksum != expected and not isinstance(expected, bytes):  # a sha256 of earlier versions is not compared
            return False
    return True


def _stretch(memory: Tensor, start: int, size: int) -> Tensor:
    if not 0 <= start <= start + size <= len(memory):
        raise EOFError("a tensor ends beyond the file")
    return memory[start : start + size]
