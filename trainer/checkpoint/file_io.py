"""Write checkpoint files atomically, verify them when reading, and never run code from them.

A file is torch's own zip archive followed by 48 bytes that torch ignores:

| bytes | content |
|---|---|
| n | output of `torch.save` |
| 32 | SHA-256 of these n bytes |
| 8 | n, little endian |
| 8 | `EVENERv1` |

The archive says, under the key `evener_file`, that a digest follows, so that a file without it is refused.
`torch.load` and Lightning can read these files, and their own files, which have no digest, can be read here.
"""

import hashlib
import logging
import os
import pickle
import re
import shutil
import socket
import struct
import time
import warnings
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import IO, Any

import torch
from pytorch_lightning.core import saving

from ...strategies.core.errors import ConfigError
from ...strategies.core.files import replacing, was_left
from ...strategies.sharding.whole import map_tensors
from ._tensor_files import FILE, PREFIX, SHARDS, blocks, verify_rows, with_tensors
from ._tensor_files import remove_leftovers as remove_shards

logger = logging.getLogger(__name__)

SUFFIX = ".ckpt"
_MAGIC = b"EVENERv1"
_MAGIC_OF_SHARDS = b"EVENERs1"
_TRAILER = struct.Struct("<32sQ8s")
_MARK = "evener_file"
"""The key of a checkpoint which says that it was written here, with a digest."""
_LIGHTNINGS = "pytorch-lightning_version"
"""The key that Lightning's checkpoints have, and ours as well."""


class CheckpointError(ConfigError):
    """A checkpoint file that can't be read or written; the message names it."""


class _HashedFile:
    """A file that computes the digest while it is written, in a single pass over the bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def trailer(self, magic: bytes) -> bytes:
        return _TRAILER.pack(self._hash.digest(), self.size, magic)


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
            hashed = _HashedFile(file)
            try:
                torch.save({**checkpoint, _MARK: 1}, hashed)  # pyright: ignore[reportArgumentType]  # `write` and `flush` are all it uses
            except RuntimeError as exc:
                # torch's archive writer replaces the cause by its own error.
                raise exc.__cause__ or exc.__context__ or OSError(str(exc)) from exc
            file.write(hashed.trailer(_MAGIC_OF_SHARDS if SHARDS in checkpoint else _MAGIC))
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


def verify(path: str | Path) -> bool:
    """Compare a file with its digest, and return whether it has one; one written by torch or Lightning has none.

    Raises:
        CheckpointError: the digest does not match.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END) - _TRAILER.size
        file.seek(max(size, 0))
        trailer = file.read()
        if size < 0 or not trailer.endswith((_MAGIC, _MAGIC_OF_SHARDS)):
            return False
        digest, num_bytes, _ = _TRAILER.unpack(trailer)
        actual = hashlib.sha256()
        for block in blocks(file, 0, size):
            actual.update(block)
    if num_bytes != size or actual.digest() != digest:
        raise CheckpointError(f"The checkpoint {path} is corrupted: its digest does not match. Use another one.")
    return True


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
    return _read(Path(path), verify(path), mapped, reader, num_readers)


def _read(
    path: Path, has_digest: bool, mapped: Collection[str] | None, reader: int = 0, num_readers: int = 1
) -> dict[str, Any]:
    checkpoint = _load(path, mmap=mapped is None and has_digest)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"The file {path} contains a {type(checkpoint).__name__}, which is not a checkpoint.")
    if checkpoint.pop(_MARK, None) is not None and not has_digest:
        raise CheckpointError(f"The checkpoint {path} is corrupted: its digest is missing. Use another one.")
    with _damage_named(path):
        if SHARDS in checkpoint:
            verify_rows(checkpoint, path.parent, reader, num_readers)
            del checkpoint[SHARDS]
        return with_tensors(checkpoint, path.parent, mapped)


@contextmanager
def _damage_named(path: Path) -> Generator[None]:
    """Refuse a file by its name, whatever comes of what it says of its tensors: it may say anything."""
    try:
        yield
    except (FileNotFoundError, EOFError) as exc:
        raise CheckpointError(f"The checkpoint {path} is incomplete: {exc}. Use another one.") from exc
    except OSError as exc:
        raise CheckpointError(f"The checkpoint {path} can't be read: {exc}.") from exc
    except MemoryError:
        raise
    except Exception as exc:
        why = exc if isinstance(exc, ValueError) else "its tensors are not what it says of them"
        raise CheckpointError(f"The checkpoint {path} is corrupted: {why}. Use another one.") from exc


def _load_whole(own: Callable[..., Any]) -> Callable[..., Any]:
    """Have Lightning's `load_from_checkpoint` read checkpoints whose tensors are in a file of shards."""

    @wraps(own)
    def load(path: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = own(path, map_location, *args, **kwargs)
        if not (isinstance(path, (str, Path)) and isinstance(checkpoint, dict) and SHARDS in checkpoint):
            return checkpoint
        whole = read(path)
        if isinstance(map_location, (str, torch.device)):
            return map_tensors(whole, lambda tensor: tensor.to(map_location))
        return whole

    return load


saving.pl_load = _load_whole(saving.pl_load)


def shard_file(path: Path) -> Path | None:
    """The file of shards that belongs to a checkpoint; None if it has none, or there is no such checkpoint."""
    with suppress(OSError, CheckpointError, KeyError, TypeError), open(path, "rb") as file:
        file.seek(-len(_MAGIC), os.SEEK_END)
        if file.read() == _MAGIC_OF_SHARDS:
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


def _load(path: str | Path, mmap: bool = False) -> Any:
    mmap = mmap and os.fsencode(path).decode(errors="replace") == str(path)  # torch maps no other name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # Warnings about pickle protocols, from files that are refused below.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as exc:
        if found := re.search(r"GLOBAL ([\w.]+)", str(exc)):
            raise CheckpointError(
                f"The checkpoint {path} is refused: it contains a Python object ({found[1]}), and loading it could run "
                "arbitrary code. Save only tensors, numbers, strings and containers of these."
            ) from None
        raise CheckpointError(f"The checkpoint {path} is incomplete or not a checkpoint.") from exc
    except Exception as exc:  # given garbage, the unpickler raises almost anything
        raise CheckpointError(f"The checkpoint {path} is incomplete or not a checkpoint.") from exc


def is_good(path: str | Path) -> bool:
    """Whether a file is a checkpoint that can be loaded; if not, a warning names it."""
    try:
        has_digest = verify(path)
        if _LIGHTNINGS not in _read(Path(path), has_digest, mapped=None) and not has_digest:
            raise CheckpointError(f"The file {path} is not a checkpoint of a trainer.")
    except (CheckpointError, OSError) as exc:
        logger.warning("%s It is skipped.", exc)
        return False
    return True


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files that killed processes of this machine left in a directory."""
    for path in directory.glob(f".*{SUFFIX}.{socket.gethostname()}-*.tmp"):
        if was_left(path.stem.rpartition("-")[2]):
            with suppress(OSError):
                path.unlink()
    remove_shards(directory, {path.name for path in _shard_files(directory) if path is not None})
