"""Keep the state of the last steps in memory that outlives the processes of a run: files in /dev/shm.

A rank that is killed then costs at most the steps since the last snapshot, without a disk that is written every few
steps. The memory is given back when the run ends; if it ends by a failure, its launcher moves the snapshot to the disk.
"""

import hashlib
import logging
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
from typing_extensions import override

from ...strategies.core.errors import ConfigError
from ...strategies.core.patching import replaced
from .checkpoint_io import VerifiedCheckpointIO
from .file_io import CheckpointError, read_good, remove_leftovers, write

logger = logging.getLogger(__name__)

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
    if dirpath is None:
        return None
    path = directory_in_memory(dirpath) / NAME
    return path if _is_own(path.parent) and path.is_file() else None


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
        self.teardown()
        discard(self._dirpath)
