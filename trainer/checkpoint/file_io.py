"""Write checkpoint files atomically, verify them when reading, and never run code from them.

A file is torch's own zip archive, whose records have checksums that torch writes, but does not compare: `verify` does.
So torch and Lightning can read these files, and theirs can be read here, and those of earlier versions, which have a
digest behind the archive.
"""

import logging
import os
import pickle
import re
import shutil
import socket
import time
import warnings
import zipfile
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.core import saving

from ...strategies.core.errors import ConfigError
from ...strategies.core.files import replacing, was_left
from ...strategies.sharding.whole import map_tensors
from ._tensor_files import FILE, PREFIX, SHARDS, with_tensors

logger = logging.getLogger(__name__)

SUFFIX = ".ckpt"
_MARK = "evener_file"
"""The key of a checkpoint which says that it was written here."""
_LIGHTNINGS = "pytorch-lightning_version"
"""The key that Lightning's checkpoints have, and ours as well."""
_BLOCK = 1 << 20
_DIRECTORY = 0x10


class CheckpointError(ConfigError):
    """A checkpoint file that can't be read or written; the message names it."""


def write(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint of plain data (`to_plain`) atomically: at any time `path` is the old file or the new one.

    The tensors of the old one are removed, if they are in a file of shards that no other checkpoint needs.

    Raises:
        OSError: the disk is full, the directory is read-only, ...; an old file at `path` is intact.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with releasing(path), replacing(path, durable=True) as temporary:
        with open(temporary, "wb") as file:
            try:
                torch.save({**checkpoint, _MARK: 2}, file)
            except RuntimeError as exc:
                # torch's archive writer replaces the cause by its own error
                raise cause if isinstance(cause := exc.__cause__ or exc.__context__, OSError) else exc from exc
            file.flush()
            os.fsync(file.fileno())
        # to the nanosecond: two files of one tick of the kernel (4 ms) would be equally new
        os.utime(temporary, ns=(now := time.time_ns(), now))


def link(source: str | Path, path: str | Path) -> None:
    """Give a checkpoint a second name without copying it, replacing any file of that name."""
    path = Path(path)
    with releasing(path), replacing(path, durable=True) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # A file system without hard links.
            shutil.copyfile(source, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())


def verify(path: str | Path) -> None:
    """Compare the records of a file with their checksums; one that is no archive has none.

    Raises:
        CheckpointError: the file is corrupted, and would be read as something else.
    """
    with _damage_named(Path(path)):
        if not zipfile.is_zipfile(path):
            return  # torch reads pickles too; it refuses an archive that is cut
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                if record.external_attr & _DIRECTORY:  # of which torch would read nothing
                    raise zipfile.BadZipFile(f"{record.filename} is a directory")
                with archive.open(record) as content:
                    while content.read(_BLOCK):
                        pass


def read(path: str | Path, mapped: Collection[str] = (), reader: int = 0, num_readers: int = 1) -> dict[str, Any]:
    """Read a checkpoint of this project, of Lightning or of torch into CPU memory.

    Args:
        path: the file.
        mapped: entries whose tensors stay in their file until they are used, if it was written in shards.
        reader: which of `num_readers` ranks this is; each verifies some of the shards.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is a directory, incomplete or corrupted, or would run code.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if os.path.isdir(path):
        raise CheckpointError(f"The checkpoint {path} is a directory. Give the path of a file.")
    checkpoint = _read(Path(path), mapped, reader, num_readers)
    checkpoint.pop(_MARK, None)
    return checkpoint


def _read(path: Path, mapped: Collection[str] | None, reader: int = 0, num_readers: int = 1) -> dict[str, Any]:
    verify(path)
    with _damage_named(path):
        checkpoint = _load(path, mmap=mapped is None)
        if not isinstance(checkpoint, dict):
            raise CheckpointError(f"The file {path} contains a {type(checkpoint).__name__}, which is not a checkpoint.")
        return with_tensors(checkpoint, path.parent, mapped, reader, num_readers)


@contextmanager
def _damage_named(path: Path) -> Generator[None]:
    """Refuse a file by its name, whatever comes of reading what it says: it may say anything."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as exc:
        if isinstance(exc, MemoryError) and zipfile.is_zipfile(path):  # an archive is whole before it is read
            raise
        if found := re.search(r"GLOBAL ([\w.]+)", str(exc)) if isinstance(exc, pickle.UnpicklingError) else None:
            raise CheckpointError(
                f"The checkpoint {path} is refused: it contains a Python object ({found[1]}), and loading it could run "
                "arbitrary code. Save only tensors, numbers, strings and containers of these."
            ) from None
        what = "corrupted" if isinstance(exc, (ValueError, zipfile.BadZipFile)) else "incomplete"
        why = (
            f": {exc}"
            if str(exc) and isinstance(exc, (OSError, EOFError, ValueError, zipfile.BadZipFile))
            else " or no checkpoint"
        )
        raise CheckpointError(f"The checkpoint {path} is {what}{why}. Use another one.") from exc


_pl_load: Any = saving.pl_load


@wraps(_pl_load)
def _load_whole(path: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Have Lightning's `load_from_checkpoint` read checkpoints whose tensors are in a file of shards."""
    checkpoint: dict[str, Any] = _pl_load(path, map_location, *args, **kwargs)
    checkpoint.pop(_MARK, None)
    if SHARDS not in checkpoint:
        return checkpoint
    moves = isinstance(map_location, (str, torch.device))
    return map_tensors(read(path), lambda tensor: tensor.to(map_location) if moves else tensor)


saving.pl_load = _load_whole


def shard_file(path: Path) -> Path | None:
    """The file of shards that belongs to a checkpoint; None if it has none, or there is no such checkpoint."""
    with suppress(Exception):
        if any(path.parent.glob(f"{PREFIX}*")):
            name = Path(_load(path, mmap=True)[FILE]).name
            return path.with_name(name) if name.startswith(PREFIX) else None
    return None


def _shard_files(directory: Path) -> set[Path | None]:
    """The files of shards that belong to the checkpoints of a directory."""
    return {shard_file(path) for path in directory.glob(f"*{SUFFIX}")}


@contextmanager
def releasing(path: Path) -> Generator[None]:
    """Remove, after the block has removed or replaced a checkpoint, its tensors if no other checkpoint has them."""
    tensors = shard_file(path)
    yield
    if tensors is not None and tensors not in _shard_files(path.parent):
        tensors.unlink(missing_ok=True)


def _load(path: Path, mmap: bool = False) -> Any:
    mmap = mmap and zipfile.is_zipfile(path)  # torch maps no file of another kind
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about pickle protocols, from files that are refused
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def is_good(path: str | Path) -> bool:
    """Whether a file is a checkpoint that can be loaded; if not, a warning names it."""
    try:
        if not {_LIGHTNINGS, _MARK} & _read(Path(path), mapped=None).keys():
            raise CheckpointError(f"The file {path} is not a checkpoint of a trainer.")
    except (CheckpointError, OSError) as exc:
        logger.warning("%s It is skipped.", str(exc).removesuffix(" Use another one."))
        return False
    return True


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files, and shards of no checkpoint, that killed processes of this machine left."""
    host, used = re.escape(socket.gethostname()), _shard_files(directory)
    names = re.compile(rf"\..*{re.escape(SUFFIX)}\.{host}-(?P<a>\d+)\.tmp|{PREFIX}{host}-(?P<b>\d+)-\d+")
    for path in directory.glob("*"):
        found = names.fullmatch(path.name)
        if found and path not in used and was_left(found["a"] or found["b"]):
            with suppress(OSError):
                path.unlink()
