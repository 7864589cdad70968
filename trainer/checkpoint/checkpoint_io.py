"""Write and read checkpoints for a trainer: Lightning's checkpoint plugin, which also writes in a thread, in shards, or
to memory that outlives the processes of a run.

URLs (`s3://…`, `memory://…`) are left to Lightning, whose files nobody verifies. Ranks together write two files:

    last.ckpt   the state, with tensors replaced by file offsets, the name of the file and its checksums
    shards-…    tensor 0: rows of rank 0, rows of rank 1, …; tensor 1: …

The first is written when the other is complete, and appears whole or not at all; the file that a checkpoint names is
never written to. So a checkpoint that exists is complete, whichever process is killed when. torch's own format for it
(torch.distributed.checkpoint) is not used: its reader unpickles metadata, so that loading a file could run any code.
"""

import hashlib
import logging
import os
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.utilities.cloud_io import get_filesystem
from lightning_fabric.utilities.types import _PATH
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...strategies.core.devices import flat_bytes, has_streams
from ...strategies.core.errors import ConfigError
from ...strategies.core.patching import replaced
from ...strategies.distributed.store import RankError, meet
from ...strategies.sharding.whole import Placed, map_tensors
from ._hparams import to_plain
from .file_io import FILE, PREFIX, SHARDS, CheckpointError, link, read, read_good, releasing, remove_leftovers, write

logger = logging.getLogger(__name__)

# entries of which a rank keeps its shards only, or copies to its own
_WEIGHTS = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint plugin for these files, which writes in the background, or in shards, where asked to.

    In the background a save copies the state (device to host), passes it to one thread and returns. Saves, links and
    removals keep their order, a save waits for the previous one, and `teardown` waits for all, so that memory holds
    at most one copy and the last file is never lost.
    """

    def __init__(self, background: bool = False, sharded: bool = False) -> None:
        self.sharded = sharded
        self._memory = HostMemory() if background else None  # training changes the state while a thread writes
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._last: Future[None] | None = None  # what the thread does last

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint, and have `CheckpointError` raised where it, or the one before, could not be written."""
        self.wait()
        plain = to_plain(checkpoint)
        copied = plain if self._memory is None else self._memory.take(plain)
        if _is_address(path) or storage_options is not None:  # which Lightning's refuses
            self._submit(path, partial(super().save_checkpoint, copied, path, storage_options))
        else:
            self._submit(path, partial(write, copied, path))

    def save_shards(self, placed: Placed, path: _PATH, strategy: Any) -> None:
        """Write a checkpoint in shards; every rank must call it."""
        if _is_address(path):
            raise CheckpointError(
                f"checkpoint.sharded=true can't write to {path}: the ranks write to one file, which needs a "
                "file system that all of them see. Set checkpoint.sharded=false, or checkpoint.dirpath to a directory."
            )
        self.wait()  # before the name is told, so that one checkpoint at a time is written
        # a name that no other file has, and that tells which process of which machine leads its writing
        name = strategy.broadcast(f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{time.time_ns()}")
        rest, parts = to_plain(placed.state) if strategy.is_global_zero else {}, placed.parts
        if self._memory is not None:
            rest, parts = self._memory.take((rest, parts))
        store, timeout_s, file = strategy.group._store, strategy.group.timeout_s, Path(path).with_name(name)
        if (writer := placed.writer) is None:
            return

        def work() -> None:
            checksum = ""
            try:
                try:
                    checksum = str(_write_rows(file, placed, parts, writer))
                finally:
                    told, late = meet(store, name, writer, placed.num_writers, checksum, timeout_s)
                if late:
                    raise RankError(f"rank {late[0]} has not written its shards of a checkpoint within {timeout_s:g} s")
                if "" in told:
                    raise OSError(f"the shards could not be written by rank {told.index('')}")
                if strategy.is_global_zero:
                    entries = [[e.start, e.num_rows, e.row_bytes, e.num_parts] for e in placed.entries]
                    shards = {"entries": entries, "num_bytes": placed.num_bytes, "digests": list(map(int, told))}
                    write({**rest, FILE: name, SHARDS: shards}, path)
            except OSError:
                if strategy.is_global_zero:
                    file.unlink(missing_ok=True)
                raise

        self._submit(path, work)

    def load_shards(self, path: _PATH, reader: int, num_readers: int) -> dict[str, Any]:
        """Read a checkpoint; tensors of weights and optimizers that were written in shards stay in their file."""
        self.wait()
        return self.load_checkpoint(path) if _is_address(path) else read(path, _WEIGHTS, reader, num_readers)

    def link_checkpoint(self, source: _PATH, path: _PATH) -> None:
        """Give the most recent checkpoint a second name."""
        self._submit(path, partial(get_filesystem(path).copy if _is_address(path) else link, str(source), str(path)))

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a file, unless the save that should have replaced it failed."""

        def remove() -> None:
            with releasing(Path(path)):
                Path(path).unlink(missing_ok=True)

        self._submit(path, partial(super().remove_checkpoint, path) if _is_address(path) else remove)

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU; a file that needs `weights_only=False` is refused."""
        self.wait()
        return super().load_checkpoint(path, weights_only=True) if _is_address(path) else read(path)

    @override
    def teardown(self) -> None:
        """Wait until every file is written."""
        self.wait()

    def wait(self) -> None:
        """Wait for the background thread; raise its error if a write failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _submit(self, path: _PATH, work: Callable[[], object]) -> None:
        """Do it, in the thread if there is one, unless what was to be done before has failed."""
        before = self._last

        def attempt() -> None:
            if before is not None:
                before.result()
            try:
                work()
            except OSError as exc:
                raise CheckpointError(
                    f"The checkpoint {path} could not be written ({exc.strerror or exc}); existing files are intact. "
                    "Free some space, or save to another disk (dirpath)."
                ) from exc

        if self._thread is None:
            attempt()
        else:
            self._last = self._thread.submit(attempt)


def _is_address(path: _PATH) -> bool:
    return "://" in str(path)


def _write_rows(path: Path, placed: Placed, parts: list[Tensor | None], writer: int) -> int:
    """Write this rank's rows to the disk, and return their checksum."""
    checksum = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.truncate(placed.num_bytes)
        for entry, part in zip(placed.entries, parts, strict=True):
            if part is not None:
                values: Any = flat_bytes(part.cpu().contiguous()).numpy()
                checksum = zlib.crc32(data := memoryview(values), checksum)
                file.seek(entry.part(writer if entry.num_parts > 1 else 0)[0])
                while data:  # the system may write less than it is given
                    data = data[file.write(data) :]
        os.fsync(file.fileno())
    return checksum


class HostMemory:
    """Memory to which one state after another is copied: the first write to fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Tensor] = {}

    @torch.inference_mode(False)  # in which a hook of a validation may save
    def take(self, state: Any) -> Any:
        """Copy all tensors of nested dicts, lists and tuples; the copy is valid until the next call."""
        copies: dict[tuple[Any, ...], Tensor] = {}
        held, self._held = self._held, {}

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
                return (tensor if isinstance(tensor, DTensor) else tensor.cpu()).clone()  # a shard stays one
            kind = tensor.shape, tensor.stride(), tensor.dtype
            same = tensor.device, tensor.data_ptr(), *kind
            if same not in copies:
                memory = held.get(place := (len(copies), *kind))
                if memory is None:  # page-locked for an accelerator, so that all copies run concurrently
                    memory = torch.empty_like(tensor, device="cpu", pin_memory=has_streams(tensor.device))
                copies[same] = self._held[place] = memory.copy_(tensor, non_blocking=True)
            return copies[same]

        copied = map_tensors(state, copy)
        for device in {device for device, *_ in copies} - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)
        return copied


# Snapshots in memory that outlives the processes of a run: files in /dev/shm. A rank that is killed then costs at most
# the steps since the last one, without a disk that is written every few steps. The memory is given back when the run
# ends; if it ends by a failure, its launcher moves the snapshot to the disk.

MEMORY = Path("/dev/shm")
NAME = "snapshot.ckpt"
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def directory_in_memory(dirpath: str | Path) -> Path:
    """The directory in memory that belongs to a directory of checkpoints."""
    digest = hashlib.sha256(os.fsencode(os.path.abspath(dirpath))).hexdigest()[:16]
    return MEMORY / f"evener-{os.getuid()}-{digest}"


def _is_own(path: Path) -> bool:
    """Whether a directory in memory, where anybody may make files, is there and this user's alone."""
    with suppress(OSError):
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _FOR_OTHERS:
            return True
        logger.warning("%s is passed over: it belongs to another user, or is open to others.", path)
    return False


def saved_in_memory(dirpath: str | Path | None) -> Path | None:
    """The snapshot that belongs to a directory of checkpoints, if there is one and nobody else could have put it."""
    path = None if dirpath is None else directory_in_memory(dirpath) / NAME
    return path if path is not None and _is_own(path.parent) and path.is_file() else None


def move_to_disk(dirpath: str | Path | None) -> Path | None:
    """Move the snapshot, where there is one, beside the checkpoints; return its new path."""
    path = saved_in_memory(dirpath)
    if dirpath is None or path is None:
        return None
    on_disk, times = Path(dirpath) / NAME, path.stat().st_mtime_ns
    if checkpoint := read_good(path):
        write(checkpoint, on_disk)
        os.utime(on_disk, ns=(times, times))  # the newest checkpoint is the one that was saved last
    discard(dirpath)
    return on_disk if checkpoint else None


def discard(dirpath: str | Path) -> None:
    """Give the memory back."""
    if _is_own(directory := directory_in_memory(dirpath)):
        shutil.rmtree(directory, ignore_errors=True)


class MemorySnapshots(VerifiedCheckpointIO):
    """Takes snapshots of a run on one machine in the background, each in the place of the one before.

    Raises:
        ConfigError: this machine has no such memory, or another user has taken the place.
    """

    def __init__(self, every_n_steps: int, dirpath: str | Path) -> None:
        super().__init__(background=True)
        self._every_n_steps, self._dirpath, self.last_step = every_n_steps, dirpath, -1
        self._directory = directory_in_memory(dirpath)
        if not MEMORY.is_dir():
            raise ConfigError(
                f"checkpoint: snapshot_every_n_steps={every_n_steps} needs {MEMORY}, which this system does not have. "
                "Set it to null, and save more often (every_n_steps)."
            )
        with suppress(OSError):  # it is there, or nobody may make it
            self._directory.mkdir(0o700)
        if not _is_own(self._directory):
            raise ConfigError(
                f"checkpoint: {self._directory} belongs to another user, or is open to others. Remove it, or set "
                "snapshot_every_n_steps to null."
            )
        remove_leftovers(self._directory)

    def is_due(self, step: int) -> bool:
        """Whether to take a snapshot after a step."""
        return step % self._every_n_steps == 0 and step != self.last_step

    def take(self, trainer: pl.Trainer) -> None:
        """Copy the state of the run to memory. Every rank must call it."""
        self.last_step = trainer.global_step
        with replaced(trainer.strategy, "_checkpoint_io", self):
            trainer.save_checkpoint(self._directory / NAME)

    @override
    def wait(self) -> None:
        """Wait for the background thread; one that does not fit into the memory is left out."""
        try:
            super().wait()
        except CheckpointError as exc:
            logger.warning("%s Training continues without it.", exc)

    def end(self) -> None:
        """Give the memory back after the run, whose last state is on the disk."""
        self.wait()
        discard(self._dirpath)
