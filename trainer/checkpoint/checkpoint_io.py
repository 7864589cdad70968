"""Write and read checkpoints for a trainer, in the background if asked to: Lightning's checkpoint plugin.

URLs (`s3://…`, `memory://…`) are left to Lightning, whose files nobody verifies.
"""

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.utilities.cloud_io import get_filesystem
from lightning_fabric.utilities.types import _PATH
from torch import Tensor
from typing_extensions import override

from ...strategies.sharding.placed import Placed, ShardIO, Writers
from ._host_memory import HostMemory
from ._hparams import to_plain
from ._tensor_files import FILE, SHARDS, WEIGHTS, ShardFile, new_name
from .file_io import CheckpointError, link, read, releasing, write

logger = logging.getLogger(__name__)


class VerifiedCheckpointIO(TorchCheckpointIO, ShardIO):
    """Lightning's checkpoint plugin for these files, optionally writing in the background.

    In the background a save copies the state (device to host), passes it to one thread and returns. Saves, links and
    removals keep their order, a save waits for the previous one, and `teardown` waits for all, so that memory holds
    at most one copy and the last file is never lost.

    Args:
        background: write in a thread while training continues.
        on_error: `raise` stops training if a file can't be written; `warn` logs a warning and continues. Existing
            files are kept either way.
        sharded: write in shards, where the strategy has them.
    """

    def __init__(
        self, background: bool = False, on_error: Literal["raise", "warn"] = "raise", sharded: bool = False
    ) -> None:
        self.background = background
        self.sharded = sharded
        self.on_error = on_error
        self._failed: set[str] = set()
        self._last_failed = False
        self._memory = HostMemory() if background else None  # training changes the state while a thread writes
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[object]] = []

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint; see `write`.

        Raises:
            CheckpointError: it, or in the background the previous one, could not be written.
            TypeError: `storage_options` are given, which Lightning's own plugin does not accept either.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported. Use a CheckpointIO plugin that supports them.")
        self.wait()
        plain = to_plain(checkpoint)
        copied = plain if self._memory is None else self._memory.take(plain)
        save = super().save_checkpoint if _is_address(path) else write
        self._submit(lambda: self._attempt(str(path), partial(save, copied, str(path))))

    @override
    def save_shards(self, placed: Placed, path: _PATH, writers: Writers) -> None:
        """Write a checkpoint in shards; see `_tensor_files`.

        Raises:
            CheckpointError: it, or in the background the previous one, could not be written; the path is an address.
        """
        if _is_address(path):
            raise CheckpointError(
                f"checkpoint.sharded=true can't write to {path}: the ranks write to one file, which needs a "
                "file system that all of them see. Set checkpoint.sharded=false, or checkpoint.dirpath to a directory."
            )
        self.wait()  # before the name is told, so that one checkpoint at a time is written
        file = ShardFile(Path(path).with_name(writers.broadcast(new_name())), placed)
        rest = to_plain(placed.state) if writers.is_first else {}
        parts = placed.parts
        if self._memory is not None:
            rest, parts = self._memory.take((rest, parts))
        self._submit(lambda: self._write_shards(file, parts, rest, Path(path), writers))

    def _write_shards(
        self, file: ShardFile, parts: list[Tensor | None], rest: dict[str, Any], path: Path, writers: Writers
    ) -> None:
        def work() -> None:
            file.write(parts)
            if writers.is_first:
                shards = {**file.layout, "digests": file.wait(writers.timeout_s)}
                write({**rest, FILE: file.path.name, SHARDS: shards}, path)

        self._attempt(str(path), work)
        if self._last_failed and writers.is_first:
            file.path.unlink(missing_ok=True)

    @override
    def load_shards(self, path: _PATH, reader: int, num_readers: int) -> dict[str, Any]:
        """Read a checkpoint; tensors of weights and optimizers that were written in shards stay in their file."""
        self.wait()
        if _is_address(path):
            return self.load_checkpoint(path)
        return read(str(path), WEIGHTS, reader, num_readers)

    def link_checkpoint(self, source: _PATH, path: _PATH) -> None:
        """Give the most recent checkpoint a second name; see `link`."""
        copy = get_filesystem(path).copy if _is_address(path) else link
        self._submit(
            lambda: None if self._last_failed else self._attempt(str(path), partial(copy, str(source), str(path)))
        )

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a file, unless the save that should have replaced it failed."""
        self._submit(lambda: self._remove(str(path)))

    def take_failed(self) -> set[str]:
        """Return, and clear, the files that could not be written; those that they should have replaced are kept."""
        failed, self._failed = self._failed, set()
        return failed

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU; see `read`. The strategy moves it to the devices.

        `weights_only=False` has no effect: a file that needs it is refused.
        """
        self.wait()
        if _is_address(path):
            return super().load_checkpoint(path, weights_only=True)
        return read(str(path))

    @override
    def teardown(self) -> None:
        """Wait until every file is written."""
        self.wait()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    @contextmanager
    def saving(self, trainer: pl.Trainer) -> Generator[None]:
        """Have this plugin write, link and remove what the trainer saves in the block."""
        other, trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io, self
        try:
            yield
        finally:
            trainer.strategy.checkpoint_io = other

    def wait(self) -> None:
        """Wait for the background thread; raise its error if a write failed."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _submit(self, work: Callable[[], object]) -> None:
        if not self.background:
            work()
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending.append(self._executor.submit(work))

    def _attempt(self, path: str, work: Callable[[], object]) -> None:
        """Write a file; if it fails, note it, and raise or warn as `on_error` says."""
        self._last_failed = False
        try:
            work()
        except OSError as exc:
            self._last_failed = True
            self._failed.add(path)
            message = f"The checkpoint {path} could not be written ({exc.strerror or exc}); existing files are intact."
            if self.on_error == "raise":
                raise CheckpointError(f"{message} Free some space, or set checkpoint.on_error=warn.") from exc
            logger.warning("%s Training continues without it.", message)

    def _remove(self, path: str) -> None:
        if self._last_failed:
            return
        if _is_address(path):
            super().remove_checkpoint(path)
        else:
            with releasing(Path(path)):
                Path(path).unlink(missing_ok=True)


def _is_address(path: _PATH) -> bool:
    return "://" in str(path)
