"""Finding the newest good checkpoint."""

import logging
from collections.abc import Iterator
from pathlib import Path

from .file_io import SUFFIX, CheckpointError, is_good

logger = logging.getLogger(__name__)


def newest_first(directory: str | Path, within: str = "**/") -> Iterator[Path]:
    """All checkpoints under a directory, the one written last first; `within=""` leaves its subdirectories out."""
    files = Path(directory).glob(f"{within}*{SUFFIX}")
    found = [(path.stat().st_mtime_ns, path) for path in files if path.is_file()]
    return (path for _, path in sorted(found, reverse=True))


def find_newest(directory: str | Path) -> Path | None:
    """Find the newest good checkpoint of an experiment.

    Args:
        directory: searched with all its subdirectories, so that one directory may hold several runs.

    Returns:
        The checkpoint written last that can be loaded, or None where there is none. A torn or altered file is named
        in a warning and passed over.
    """
    return next((path for path in newest_first(directory) if is_good(path)), None)


def good_or_newest(path: str | Path) -> Path:
    """Choose the checkpoint to resume from where one was given.

    Args:
        path: the checkpoint.

    Returns:
        It, or, where it is torn or altered, the newest good one of its directory; a warning says so.

    Raises:
        CheckpointError: there is no good one.
    """
    if is_good(path):
        return Path(path)
    beside = newest_first(Path(path).parent, within="")  # what is in subdirectories is of other runs
    newest = next((file for file in beside if is_good(file)), None)
    if newest is None:
        raise CheckpointError(f"The checkpoint {path} can't be used, and there is no good one beside it.")
    logger.warning("Instead of %s, training continues from %s.", path, newest)
    return newest
