"""Find the newest valid checkpoint."""

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from .file_io import SUFFIX, CheckpointError, is_good

logger = logging.getLogger(__name__)


def newest_first(directory: str | Path, within: str = "**/") -> Iterator[Path]:
    """All checkpoints under a directory, newest first; `within=""` excludes subdirectories."""
    files = Path(directory).glob(f"{within}*{SUFFIX}")
    found = [(path.stat().st_mtime_ns, path) for path in files if path.is_file()]
    return (path for _, path in sorted(found, reverse=True))


def find_newest(directory: str | Path, beside: Path | None = None) -> Path | None:
    """Find the newest valid checkpoint of an experiment.

    Args:
        directory: searched with all its subdirectories, so it may hold several runs.
        beside: a checkpoint elsewhere, which is taken if it is newer.

    Returns:
        The newest checkpoint that can be loaded, or None if there is none. An incomplete or corrupted file is skipped
        with a warning.
    """
    found = next((path for path in newest_first(directory) if is_good(path)), None)
    if beside is None or not is_good(beside):
        return found
    return beside if found is None or beside.stat().st_mtime_ns > found.stat().st_mtime_ns else found


def good_or_newest(path: str | Path) -> Path:
    """Choose the checkpoint to resume from, given a path.

    Returns:
        `path`, or, with a warning, the newest valid checkpoint of its directory if `path` is incomplete or corrupted.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    beside = newest_first(Path(path).parent, within="")  # subdirectories belong to other runs
    newest = next((file for file in chain([Path(path)], beside) if is_good(file)), None)
    if newest is None:
        raise CheckpointError(f"The checkpoint {path} can't be used, and its directory has no other valid checkpoint.")
    if newest == Path(path):
        return newest
    logger.warning("Instead of %s, training continues from %s.", path, newest)
    return newest
