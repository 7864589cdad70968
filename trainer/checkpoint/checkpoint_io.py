"""Write and read checkpoints for a trainer, in the background if asked to: Lightning's checkpoint plugin.

URLs (`s3://…`, `memory://…`) are left to Lightning, whose files nobody verifies. Ranks together write two files:

    last.ckpt   the state, with tensors replaced by file offsets, the name of the file and its checksums
    shards-…    tensor 0: rows of rank 0, rows of rank 1, …; tensor 1: …

The first is written when the other is complete, and appears whole or not at all; the file that a checkpoint names is
never written to. So a checkpoint that exists is complete, whichever process is killed when. torch's own format for it
(torch.distributed.checkpoint) is not used: its reader unpickles metadata, so that loading a file could run any code.
"""

import os
import socket
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.utilities.cloud_io import get_filesystem
from lightning_fabric.utilities.types import _PATH
from torch import Tensor
from torch.distributed import Store
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...strategies.core.devices import flat_bytes, has_streams
from ...strategies.distributed.store import RankError, wait_for
from ...strategies.sharding.whole import Placed, map_tensors
from ._hparams import to_plain
from .file_io import FILE, PREFIX, SHARDS, CheckpointError, link, read, releasing, write

# entries of which a rank keeps its shards only, or copies to its own
_WEIGHTS = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint plugin for these files, which writes in the background, or in shards, where asked to.

    In the background a save copies the state (device to host), passes it to one thread and returns. Saves, links and
    removals keep their order, a save waits for the previous one, and `teardown` waits for all, so that memory holds
    at most one copy and the last file is never lost.
    """

    def __init__(self, background: bool = False, sharded: bool = False) -> None:
        self.background = background
        self.sharded = sharded
        self._memory = HostMemory() if background else None  # training changes the state while a thread writes
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint, and have `CheckpointError` raised where it, or the one before, could not be written."""
        self.wait()
        plain = to_plain(checkpoint)
        copied = plain if self._memory is None else self._memory.take(plain)
        if _is_address(path) or storage_options is not None:  # which Lightning's refuses
            self._submit(path, partial(super().save_checkpoint, copied, path, storage_options))
        else:
            self._submit(path, partial(write, copied, str(path)))

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
        store, keys = strategy.group._store, [f"{name}/{writer}" for writer in range(placed.num_writers)]

        def work() -> None:
            file = Path(path).with_name(name)
            try:
                checksum = _write_rows(file, placed, parts)
                if placed.writer is not None:
                    store.set(keys[placed.writer], str(checksum))
                if strategy.is_global_zero:
                    entries = [[e.start, e.num_rows, e.row_bytes, e.num_parts] for e in placed.entries]
                    digests = _checksums(store, keys, strategy.group.timeout_s)
                    shards = {"entries": entries, "num_bytes": placed.num_bytes, "digests": digests}
                    write({**rest, FILE: name, SHARDS: shards}, path)
            except OSError:
                if strategy.is_global_zero:
                    file.unlink(missing_ok=True)
                elif placed.writer is not None:
                    store.set(keys[placed.writer], "")  # the first rank learns of it
                raise

        self._submit(path, work)

    def load_shards(self, path: _PATH, reader: int, num_readers: int) -> dict[str, Any]:
        """Read a checkpoint; tensors of weights and optimizers that were written in shards stay in their file."""
        self.wait()
        return self.load_checkpoint(path) if _is_address(path) else read(path, _WEIGHTS, reader, num_readers)

    def link_checkpoint(self, source: _PATH, path: _PATH) -> None:
        """Give the most recent checkpoint a second name."""
        copy = get_filesystem(path).copy if _is_address(path) else link
        self._submit(path, partial(copy, str(source), str(path)))

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
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def wait(self) -> None:
        """Wait for the background thread; raise its error if a write failed."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _submit(self, path: _PATH, work: Callable[[], object]) -> None:
        """Do it, in the thread if there is one, unless what was to be done before has failed."""
        if not self.background:
            _attempt(path, work)
            return
        self._executor = self._executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        before = self._pending[-1] if self._pending else None
        self._pending.append(self._executor.submit(_attempt, path, work, before))


def _attempt(path: _PATH, work: Callable[[], object], before: Future[None] | None = None) -> None:
    if before is not None:
        before.result()
    try:
        work()
    except OSError as exc:
        raise CheckpointError(
            f"The checkpoint {path} could not be written ({exc.strerror or exc}); existing files are intact. Free some "
            "space, or save to another disk (dirpath)."
        ) from exc


def _is_address(path: _PATH) -> bool:
    return "://" in str(path)


def _write_rows(path: Path, placed: Placed, parts: list[Tensor | None]) -> int:
    """Write this rank's rows to the disk, and return their checksum."""
    checksum = 0
    if placed.writer is None:
        return checksum
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.truncate(placed.num_bytes)
        for entry, part in zip(placed.entries, parts, strict=True):
            if part is not None:
                values: Any = flat_bytes(part.cpu().contiguous()).numpy()
                checksum = zlib.crc32(data := memoryview(values), checksum)
                file.seek(entry.part(placed.writer if entry.num_parts > 1 else 0)[0])
                while data:  # the system may write less than it is given
                    data = data[file.write(data) :]
        os.fsync(file.fileno())
    return checksum


def _checksums(store: Store, keys: list[str], timeout_s: float) -> list[int]:
    """Wait until all ranks have written their rows, and return their checksums."""
    wait_for(store, keys, timeout_s)
    for rank, key in enumerate(keys):
        if not store.check([key]):
            raise RankError(f"rank {rank} has not written its shards of a checkpoint within {timeout_s:g} s")
    found = [store.get(key) for key in keys]
    if b"" in found:
        raise OSError(f"the shards could not be written by rank {found.index(b'')}")
    return list(map(int, found))


class HostMemory:
    """Memory to which one state after another is copied: the first write to fresh memory costs more than the copy.

    That of tensors on accelerators is page-locked, so that all copies run concurrently.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    @torch.inference_mode(False)  # in which a hook of a validation may save
    def take(self, state: Any) -> Any:
        """Copy all tensors of nested dicts, lists and tuples; the copy is valid until the next call."""
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if isinstance(tensor, DTensor):  # a shard, of a moving average say: it stays one
                return tensor.clone()
            if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
                return tensor.cpu().clone()
            same = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if same not in copies:
                copies[same] = self._place(len(copies), tensor).copy_(tensor, non_blocking=True)
            return copies[same]

        copied = map_tensors(state, copy)
        for device in {device for device, *_ in copies} - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)
        return copied

    def _place(self, index: int, tensor: Tensor) -> Tensor:
        """The memory of a tensor, which is new if the state before had another one in its place."""
        alike = torch.empty_like(tensor, device="meta")  # whose elements fill a stretch of memory
        held = self._memory[index] if index < len(self._memory) else None
        if held is None or (held.shape, held.stride(), held.dtype) != (alike.shape, alike.stride(), alike.dtype):
            pinned = has_streams(tensor.device)
            held = torch.empty_strided(alike.shape, alike.stride(), dtype=alike.dtype, pin_memory=pinned)
            self._memory[index:] = [held]
        return held
