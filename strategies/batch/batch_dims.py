"""Read the option `batch_dims`, by which a user says which dimension of a value is samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..core.errors import ConfigError
from .tree import Path, option_key

BatchDims: TypeAlias = Mapping[Any, Any]
"""The option `batch_dims`: for the path of a value `list`, `none` or 0; of a result also `sum` or `mean`."""

_WORDS: dict[Any, str] = {"list": "list", "none": "shared", None: "shared", 0: "rows", "0": "rows"}
REDUCTIONS = {"sum": "sum", "mean": "mean"}


def verify_batch_dims(dims: BatchDims | None, strategy: str) -> dict[str, str]:
    """Read the option `batch_dims`.

    Returns:
        For each path the role (or the reduction) of its value.

    Raises:
        ConfigError: a word is unknown.
    """
    words = _WORDS | REDUCTIONS
    for key, word in (dims or {}).items():
        if word not in words or isinstance(word, bool):
            raise ConfigError(
                f"{strategy}: batch_dims={{{key}: {word}}} is unknown. Choose one of list (one element per sample), "
                "none (the same for all samples), 0 (tensors with one row per sample); for results also sum, mean."
            )
    return {str(key): words[word] for key, word in (dims or {}).items()}


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
        """How an option names a path; the whole batch is `batch`."""
        return option_key((*self.prefix, *path)) or "batch"

    def word(self, path: Path) -> str | None:
        """What the user said of a path; 0 for a structure is said of all tensors in it."""
        found = self.words.get(self.key(path))
        if found is None:
            above = [self.words.get(self.key(path[:i])) for i in range(len(path))]
            return "rows" if "rows" in above else None
        return found

    def names_elements(self, value: Any, path: Path) -> bool:
        """Whether the user said what an element of a list is (`{"0": list}`), which is then no list of samples."""
        above = tuple(map(str, (*self.prefix, *path)))
        keys = (tuple(key.split(".")) for key in self.words)
        elements = set(map(str, range(len(value))))
        return any(key[: len(above)] == above and elements.intersection(key[len(above) :][:1]) for key in keys)
