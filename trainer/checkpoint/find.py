"""Find the newest or the best valid checkpoint."""

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from .file_io import SUFFIX, CheckpointError, is_good, read

logger = logging.getLogger(__name__)


def newest_first(directory: str | Path, within: str = "**/") -> Iterator[Path]:
    """All checkpoints under a directory, newest first; `within=""` excludes subdirectories."""
    files = Path(directory).glob(f"{within}*{SUFFIX}")
    found = [(path.stat().st_mtime_ns, path) for path in files if path.is_file()]
    return (path for _, path in sorted(found, reverse=True))


def find_newest(directory: str | Path, beside: Path | None = None) -> Path | None:
    """Find the newest valid checkpoint in a directory of runs, with all its subdirectories; None if there is none.

    One that is `beside` them is taken if it is newer. An incomplete or corrupted file is skipped with a warning.
    """
    found = next((path for path in newest_first(directory) if is_good(path)), None)
    if beside is None or not is_good(beside):
        return found
    return beside if found is None or beside.stat().st_mtime_ns > found.stat().st_mtime_ns else found


def find_best(directory: str | Path) -> Path | None:
    """Find the best checkpoint of an experiment, by the metric that its newest run ranked its checkpoints by.

    It is the one that the newest checkpoint below the directory names, if that can be loaded; that of an older one if
    not; or None if none names any.
    """
    found = (_best_named_in(path) for path in newest_first(directory) if is_good(path))
    return next((path for path in found if path is not None), None)


def _best_named_in(path: Path) -> Path | None:
    for state in read(path).get("callbacks", {}).values():
        if isinstance(state, dict) and state.get("best_model_score") is not None and state.get("best_model_path"):
            named = Path(state["best_model_path"])
            candidates = (path.with_name(named.name), named)  # beside it, if the run's directory was moved
            return next((file for file in candidates if file.is_file() and is_good(file)), None)
    return None


def good_or_newest(path: str | Path) -> Path:
    """Choose the checkpoint to resume from: a path, or, with a warning, the newest valid one beside a damaged one.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    beside = newest_first(Path(path).parent, within="")  # subdirectories belong to other runs
    newest = next((file for file in chain([Path(path)], beside) if is_good(file)), None)
    if newest is None:
        raise CheckpointError(f"The checkpoint {path} can't be used, and its directory has no other valid checkpoint.")
    if newest != Path(path):
        logger.warning("Instead of %s, training continues from %s.", path, newest)
    return newest
