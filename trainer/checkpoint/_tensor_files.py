"""Write and read the tensors of checkpoints that are in a file of their own: shards on the disk, snapshots in memory.

    last.ckpt, snapshot.ckpt   the state, with tensors replaced by file offsets, the name of the file and its digests
    shards-…                   tensor 0: rows of rank 0, rows of rank 1, …; tensor 1: …; a mark per rank, with a digest
    tensors-…-0, tensors-…-1   in memory: one is in use, the other is written next

The first is written when the other is complete, and appears whole or not at all; the file that a checkpoint names is
never written to. So a checkpoint that exists is complete, whichever process is killed when. In memory each tensor is
copied once, to where it stays: training waits for that alone, and the checksum is computed beside it.

torch.distributed.checkpoint is not used: its reader unpickles its metadata, and objects among the values, without
restriction, so that loading a file could run any code.
"""

import hashlib
import os
import socket
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...strategies.core.devices import flat_bytes
from ...strategies.core.files import was_left
from ...strategies.sharding.placed import Entry, Placed
from ._host_memory import filled, lay_out, piece, view

FILE = "evener_tensors"
"""The key of a checkpoint with the name of the file that has its tensors."""
SHARDS = "evener_shards"
"""The key of a checkpoint with the layout of that file, and the digests of all ranks; of one in memory its crc32."""
WEIGHTS = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")
"""Entries of which a rank keeps its shards only, or copies to its own."""
PREFIX = "shards-"
_MARK = struct.Struct("<32s8s")
_WRITTEN, _FAILED = b"written.", b"failed.."
_POLL_S = 0.02
_BLOCK = 1 << 20


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
                digest = hashlib.sha256()
                for entry, part in zip(self._placed.entries, parts, strict=True):
                    if part is not None:
                        _write_rows(file, entry.part(writer if entry.num_parts > 1 else 0)[0], part, digest)
                os.fsync(file.fileno())
                self._mark(file, writer, _MARK.pack(digest.digest(), _WRITTEN))
            except OSError:
                with suppress(OSError):
                    self._mark(file, writer, _MARK.pack(bytes(32), _FAILED))
                raise

    def _mark(self, file: Any, writer: int, mark: bytes) -> None:
        file.seek(self._placed.num_bytes + writer * _MARK.size)
        file.write(mark)
        os.fsync(file.fileno())

    def wait(self, timeout_s: float) -> list[bytes]:
        """Wait until all ranks have written their rows, and return their digests."""
        deadline = time.monotonic() + timeout_s
        while True:
            with open(self.path, "rb") as file:  # opened anew: other machines' writes show then
                file.seek(self._placed.num_bytes)
                marks = list(_MARK.iter_unpack(file.read(self._placed.num_writers * _MARK.size)))
            missing = [rank for rank, (_, mark) in enumerate(marks) if mark != _WRITTEN]
            if not missing:
                return [digest for digest, _ in marks]
            failed = [rank for rank in missing if marks[rank][1] == _FAILED]
            if failed or time.monotonic() > deadline:
                why = f"could not be written by rank {failed[0]}" if failed else f"of ranks {missing} did not come"
                raise OSError(f"the shards {why}")
            time.sleep(_POLL_S)


def _write_rows(file: Any, start: int, part: Tensor, digest: Any) -> None:
    values: Any = flat_bytes(part.cpu().contiguous()).numpy()
    data = memoryview(values)
    digest.update(data)
    file.seek(start)
    while data:  # the system may write less than it is given
        data = data[file.write(data) :]


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
        laid_out = lay_out(state)
        self._num_bytes = laid_out.num_bytes
        laid_out.copy_to(self._buffer(max(self._num_bytes, 1)))
        return {**laid_out.state, FILE: self._file.name}

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

    @property
    def _file(self) -> Path:
        return self._directory / f"{self._name}-{self._turn}"

    def _buffer(self, num_bytes: int) -> Tensor:
        held = self._buffers.pop(self._turn, None)
        if held is None or held.numel() < num_bytes:
            with open(self._file, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # writing to a mapping beyond the memory is fatal
            held = torch.from_file(str(self._file), shared=True, size=num_bytes, dtype=torch.uint8)
        self._buffers[self._turn] = held
        return held


def with_tensors(checkpoint: dict[str, Any], directory: Path, mapped: Collection[str] | None = ()) -> dict[str, Any]:
    """Replace the places of tensors by copies; those of `mapped` entries (None: all) stay in the file until used."""
    if FILE not in checkpoint:
        return checkpoint
    file = tensor_file(checkpoint, directory)
    memory = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)

    def in_file(*place: Any) -> Tensor:
        return view(memory, *place)

    def copy(start: int, dtype: torch.dtype, shape: list[int], stride: list[int]) -> Tensor:
        own = piece(memory, start, dtype, shape).clone()  # as bytes: not every type can be copied
        return view(own, 0, dtype, shape, stride)

    entries = {key: value for key, value in checkpoint.items() if key != FILE}
    stay = {key: value for key, value in entries.items() if mapped is None or key in mapped}
    found = filled(stay, in_file) | filled({key: entries[key] for key in entries.keys() - stay.keys()}, copy)
    return {key: found[key] for key in entries}


def tensor_file(checkpoint: dict[str, Any], directory: Path) -> Path:
    """The file of a checkpoint's tensors.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = directory / Path(checkpoint[FILE]).name
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}, which must lie beside it, is missing")
    return path


def verify_rows(checkpoint: dict[str, Any], directory: Path, reader: int = 0, num_readers: int = 1) -> None:
    """Compare the file of a checkpoint's tensors with its digests; each of several readers verifies some.

    Raises:
        EOFError: the file is too short.
        ValueError: a digest does not match.
    """
    layout, path = checkpoint[SHARDS], tensor_file(checkpoint, directory)
    if path.stat().st_size < layout["num_bytes"]:
        raise EOFError(f"{path} is too short")
    entries = [Entry(*entry) for entry in layout["entries"]]
    with open(path, "rb") as file:
        for writer in range(reader, len(layout["digests"]), num_readers):
            of_writer = [entry.part(writer) for entry in entries if entry.num_parts > 1 or writer == 0]
            found = (block for start, size in of_writer for block in blocks(file, start, size))
            if not _matches(found, layout["digests"][writer]):
                raise ValueError(f"the digest of {path} does not match")


def _matches(found: Iterable[bytes], expected: bytes | int) -> bool:
    digest, crc = hashlib.sha256(), 0
    for block in found:
        if isinstance(expected, int):
            crc = zlib.crc32(block, crc)
        else:
            digest.update(block)
    return expected == (crc if isinstance(expected, int) else digest.digest())


def blocks(file: Any, start: int, left: int) -> Iterator[bytes]:
    """Read a stretch of a file, given its first byte and its length, in pieces."""
    file.seek(start)
    while left and (block := file.read(min(_BLOCK, left))):
        left -= len(block)
        yield block


def remove_leftovers(directory: Path, used: set[str]) -> None:
    """Remove the files of tensors that killed processes of this machine left without a checkpoint."""
    for path in directory.glob(f"{PREFIX}*"):
        host, _, pid = path.name.removeprefix(PREFIX).rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and path.name not in used and was_left(pid):
            with suppress(OSError):
                path.unlink()
