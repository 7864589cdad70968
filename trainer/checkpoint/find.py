"""Find the newest or the best valid checkpoint."""

import logging
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from .file_io import SUFFIX, CheckpointError, is_good, read

logger = logging.getLogger(__name__)


def _newest_first(files: Iterable[Path]) -> list[Path]:
    """Sort files by their times, and names of one file so that `last.ckpt` comes before that of a step."""
    return sorted(filter(Path.is_file, files), key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)


def find_newest(directory: str | Path, beside: Path | None = None) -> Path | None:
    """Find the newest valid checkpoint in a directory of runs, with all its subdirectories; None if there is none.

    One that is `beside` them is taken if it is newer. An incomplete or corrupted file is skipped with a warning.
    """
    files = chain(Path(directory).rglob(f"*{SUFFIX}"), () if beside is None else (beside,))
    return next(filter(is_good, _newest_first(files)), None)


def find_best(directory: str | Path) -> Path | None:
    """Find the best checkpoint of an experiment, by the metric that its newest run ranked its checkpoints by.

    It is the one that the newest checkpoint below the directory names, if that can be loaded; that of an older one if
    not; or None if none names any.
    """
    found = map(_best_named_in, filter(is_good, _newest_first(Path(directory).rglob(f"*{SUFFIX}"))))
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
    beside = _newest_first(Path(path).parent.glob(f"*{SUFFIX}"))  # subdirectories belong to other runs
    newest = next(filter(is_good, [Path(path), *beside]), None)
    if newest is None:
        raise CheckpointError(f"The checkpoint {path} can't be used, and its directory has no other valid checkpoint.")
    if newest != Path(path):
        logger.warning("Instead of %s, training continues from %s.", path, newest)
    return newest
