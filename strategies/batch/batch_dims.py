"""Read the option `batch_dims`, by which a user says which dimension of a value is samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..core.errors import ConfigError
from .tree import Path

BatchDims: TypeAlias = Mapping[Any, Any]
"""The option `batch_dims`: for the path of a value `list`, `none` or 0; of a result also `sum` or `mean`."""

REDUCTIONS = {"sum": "sum", "mean": "mean"}
_WORDS: dict[Any, str] = {"list": "list", "none": "shared", None: "shared", 0: "rows", "0": "rows", **REDUCTIONS}


def verify_batch_dims(dims: BatchDims | None, strategy: str) -> dict[str, str]:
    """Read the option `batch_dims`.

    Returns:
        For each path the role (or the reduction) of its value.

    Raises:
        ConfigError: a word is unknown.
    """
    for key, word in (dims or {}).items():
        if word not in _WORDS or isinstance(word, bool):
            raise ConfigError(
                f"{strategy}: batch_dims={{{key}: {word}}} is unknown. Choose one of list (one element per sample), "
                "none (the same for all samples), 0 (tensors with one row per sample); for results also sum, mean."
            )
    return {str(key): _WORDS[word] for key, word in (dims or {}).items()}


@dataclass(frozen=True)
class DeclaredDims:
    """What the option says of the values of a batch, or of a result.

    Args:
        words: what `verify_batch_dims` returned.
        prefix: what the paths of options begin with, which have no prefix for batches.
    """

    words: Mapping[str, str]
    prefix: Path

    def key(self, path: Path) -> str:
        """How an option names a path, `boxes.0`; the whole batch is `batch`."""
        return ".".join(map(str, (*self.prefix, *path))) or "batch"

    def word(self, path: Path) -> str | None:
        """What the user said of a path; 0 for a structure is said of all tensors in it."""
        if not self.words:
            return None
        said = [self.words.get(self.key(path[:i])) for i in range(len(path) + 1)]
        return said[-1] or ("rows" if "rows" in said else None)
