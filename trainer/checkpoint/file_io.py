"""Write checkpoint files whole and of plain data, find and verify them, and never run code from them.

A file is torch's own zip archive, so torch and Lightning can read it, and theirs can be read here. Its records have
checksums that torch writes, but does not compare: `read` does. The tensors of one that was written in shards are in a
file beside it (`checkpoint_io.py`).
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
import zlib
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...strategies.core.errors import ConfigError
from ...strategies.core.files import replacing, was_left
from ...strategies.sharding.whole import PLACE, Entry

logger = logging.getLogger(__name__)

SUFFIX = ".ckpt"
FILE = "evener_tensors"  # the key of a checkpoint with the name of the file that has its tensors
SHARDS = "evener_shards"  # the key with the layout of that file, and each rank's crc32
PREFIX = "shards-"
_LIGHTNINGS = "pytorch-lightning_version"  # the key that every trainer's checkpoint has
_DIRECTORY = 0x10


class CheckpointError(ConfigError):
    """A checkpoint file that can't be read or written; the message names it."""


# Write


def write(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint of plain data (`to_plain`) atomically: at any time `path` is the old file or the new one.

    Raises:
        OSError: the disk is full, the directory is read-only, ...; an old file at `path` is intact.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with releasing(path), replacing(path, durable=True) as temporary:
        with open(temporary, "wb") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as exc:
                # torch's archive writer replaces the cause by its own error
                raise cause if isinstance(cause := exc.__cause__ or exc.__context__, OSError) else exc from exc
            file.flush()
            os.fsync(file.fileno())
        # to the nanosecond: two files of one tick of the kernel (4 ms) would be equally new
        os.utime(temporary, ns=(now := time.time_ns(), now))


def link(source: str | Path, path: str | Path) -> None:
    """Give a checkpoint a second name without copying it, replacing any file of that name."""
    with releasing(Path(path)), replacing(Path(path), durable=True) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # A file system without hard links.
            shutil.copyfile(source, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())


def shard_file(path: Path) -> Path | None:
    """The file of shards that belongs to a checkpoint; None if it has none, or there is no such checkpoint."""
    with suppress(Exception):
        if any(path.parent.glob(f"{PREFIX}*")):
            name = Path(_load(path, mmap=True)[FILE]).name
            return path.with_name(name) if name.startswith(PREFIX) else None
    return None


def _shard_files(directory: Path) -> set[Path | None]:
    return set(map(shard_file, directory.glob(f"*{SUFFIX}")))


@contextmanager
def releasing(path: Path) -> Generator[None]:
    """Remove, after the block has removed or replaced a checkpoint, its tensors if no other checkpoint has them."""
    tensors = shard_file(path)
    yield
    if tensors is not None and tensors not in _shard_files(path.parent):
        tensors.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files, and shards of no checkpoint, that killed processes of this machine left."""
    host, used = re.escape(socket.gethostname()), _shard_files(directory)
    names = re.compile(rf"(?:\..*{re.escape(SUFFIX)}\.|{PREFIX}){host}-(\d+)(?:\.tmp|-\d+)")
    for path in directory.glob("*"):
        if (found := names.fullmatch(path.name)) and path not in used and was_left(found[1]):
            with suppress(OSError):
                path.unlink()


# Read


def read(
    path: str | Path, mapped: Collection[str] | None = (), reader: int = 0, num_readers: int = 1
) -> dict[str, Any]:
    """Read a checkpoint of this project, of Lightning or of torch into CPU memory.

    Args:
        path: the file.
        mapped: entries whose tensors stay in their file until they are used, if it was written in shards; None for all.
        reader: which of `num_readers` ranks this is; each verifies some of the shards.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is incomplete or corrupted, or would run code.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:  # a file may say anything
        if is_archive := zipfile.is_zipfile(path):  # torch reads pickles too; it refuses an archive that is cut
            _compare_records(path)
        checkpoint = _load(path, mmap=mapped is None and is_archive)
        if isinstance(checkpoint, dict):
            return _with_tensors(checkpoint, path.parent, mapped, reader, num_readers)
    except Exception as exc:
        if isinstance(exc, MemoryError) and zipfile.is_zipfile(path):  # an archive is whole before it is read
            raise
        if found := re.search(r"GLOBAL ([\w.]+)", str(exc)) if isinstance(exc, pickle.UnpicklingError) else None:
            raise CheckpointError(
                f"The checkpoint {path} is refused: it contains a Python object ({found[1]}), and loading it could run "
                "arbitrary code. Save only tensors, numbers, strings and containers of these."
            ) from None
        what = "corrupted" if isinstance(exc, (ValueError, zipfile.BadZipFile)) else "incomplete"
        tells = str(exc) and isinstance(exc, (OSError, EOFError, ValueError, zipfile.BadZipFile))
        why = f": {exc}" if tells else " or no checkpoint"
        raise CheckpointError(f"The checkpoint {path} is {what}{why}. Use another one.") from exc
    raise CheckpointError(f"The file {path} contains a {type(checkpoint).__name__}, which is not a checkpoint.")


def _compare_records(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.external_attr & _DIRECTORY:  # of which torch would read nothing
                raise zipfile.BadZipFile(f"{record.filename} is a directory")
            with archive.open(record) as content:
                while content.read(1 << 20):
                    pass


def _load(path: Path, mmap: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about pickle protocols, from files that are refused
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _with_tensors(
    checkpoint: dict[str, Any], directory: Path, mapped: Collection[str] | None, reader: int, num_readers: int
) -> dict[str, Any]:
    """Replace the places of tensors by copies, once this reader has verified its share of the ranks' rows."""
    if FILE not in checkpoint:
        return checkpoint
    path = directory / Path(checkpoint.pop(FILE)).name
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}, which must lie beside it, is missing")
    memory = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    if SHARDS in checkpoint:
        _compare_rows(memory, checkpoint.pop(SHARDS), path, reader, num_readers)
    found: dict[tuple[bool, int], Tensor] = {}

    def fill(tree: Any, stays: bool) -> Any:
        if isinstance(tree, dict) and PLACE in tree:
            key = stays, tree[PLACE][0]
            if key not in found:
                found[key] = _tensor(memory, tree[PLACE], stays)
            return found[key]
        if isinstance(tree, dict):
            return type(tree)((key, fill(value, stays)) for key, value in tree.items())
        return type(tree)(fill(value, stays) for value in tree) if type(tree) in (list, tuple) else tree

    return {key: fill(value, mapped is None or key in mapped) for key, value in checkpoint.items()}


def _compare_rows(memory: Tensor, layout: Any, path: Path, reader: int, num_readers: int) -> None:
    """Compare rows with the checksums of the ranks that wrote them."""
    entries = [Entry(*entry) for entry in layout["entries"]]
    for writer, expected in enumerate(layout["digests"]):
        if writer % num_readers == reader and not isinstance(expected, bytes):  # a sha256 of earlier versions
            parts = [entry.part(writer) for entry in entries if entry.num_parts > 1 or writer == 0]
            rows: list[Any] = [_stretch(memory, *part).numpy() for part in parts]
            if reduce(lambda crc, each: zlib.crc32(each, crc), rows, 0) != expected:
                raise ValueError(f"the checksum of {path} does not match")


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


def _stretch(memory: Tensor, start: int, size: int) -> Tensor:
    if not 0 <= start <= start + size <= len(memory):
        raise EOFError("a tensor ends beyond the file")
    return memory[start : start + size]


# Find


def read_good(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint whose tensors stay in the file; None, with a warning, if it can't be loaded or is none."""
    try:
        if _LIGHTNINGS in (checkpoint := read(path, mapped=None)):
            return checkpoint
        raise CheckpointError(f"The file {path} is not a checkpoint of a trainer.")
    except (CheckpointError, OSError) as exc:
        logger.warning("%s It is skipped.", str(exc).removesuffix(" Use another one."))
        return None


def _newest_first(files: Iterable[Path]) -> list[Path]:
    """Sort files by their times, and names of one file so that `last.ckpt` comes before that of a step."""
    return sorted(filter(Path.is_file, files), key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)


def find_newest(directory: str | Path, beside: Path | None = None) -> Path | None:
    """Find the newest valid checkpoint in a directory of runs, with all its subdirectories; None if there is none.

    One that is `beside` them is taken if it is newer. An incomplete or corrupted file is skipped with a warning.
    """
    files = chain(Path(directory).rglob(f"*{SUFFIX}"), () if beside is None else (beside,))
    return next(filter(read_good, _newest_first(files)), None)


def find_best(directory: str | Path) -> Path | None:
    """Find the best checkpoint of an experiment, by the metric that its newest run ranked its checkpoints by.

    It is the one that the newest checkpoint below the directory names, if that can be loaded; that of an older one if
    not; or None if none names any.
    """
    for path in _newest_first(Path(directory).rglob(f"*{SUFFIX}")):
        for state in ((read_good(path) or {}).get("callbacks") or {}).values():
            if isinstance(state, dict) and state.get("best_model_score") is not None and state.get("best_model_path"):
                named = Path(state["best_model_path"])
                candidates = (path.with_name(named.name), named)  # beside it, if the run's directory was moved
                if best := next((file for file in candidates if file.is_file() and read_good(file)), None):
                    return best
    return None


def good_or_newest(path: str | Path) -> Path:
    """Choose the checkpoint to resume from: a path, or, with a warning, the newest valid one beside a damaged one.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    beside = _newest_first(Path(path).parent.glob(f"*{SUFFIX}"))  # subdirectories belong to other runs
    newest = next(filter(read_good, [Path(path), *beside]), None)
    if newest is None:
        raise CheckpointError(f"The checkpoint {path} can't be used, and its directory has no other valid checkpoint.")
    if newest != Path(path):
        logger.warning("Instead of %s, training continues from %s.", path, newest)
    return newest
