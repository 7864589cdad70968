"""Decide, once per run and value, which dimension of a batch's values is samples: a convention, and the user's word.

a value of a batch of N samples       is
tensor or array of N rows             cut by rows
list or tuple of N elements           cut between its elements
object with `split(sizes)`            cut by itself; so are torch_geometric's batches, by `to_data_list`
mapping, namedtuple, dataclass        a structure; so are other lists, and those in which all is as long as the batch
anything else                         shared: all chunks have it

Where a dataset gives samples by index, a batch of 7 decides (`settle`), else the first one. There N is the number of
rows of a tensor outside of lists, or without these the length of a list: the loader's `batch_size`, if one is as long,
else that of the first.

The option `batch_dims` says otherwise. What was decided for a path (`boxes`, `views.0`) holds for the whole run; a
shared tensor whose number of rows then becomes another is not cut, but refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..core.errors import ConfigError, PartsDiffer
from ..core.types import Batch, Chunk, Sizes
from .tree import Path, Role, are_samples, called, children, cut, is_array, is_sequence, length, splits_itself

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


def num_samples(batch: Batch) -> int | None:
    """Count the samples of a batch of which nothing else is known; None where it holds nothing to count.

    For what is only shown. What is cut or weighed is counted by `BatchStructure.num_samples`.
    """
    return BatchStructure().num_samples(batch)


class BatchStructure:
    """What the values of the batches of one loader are.

    Args:
        options: what `verify_batch_dims` returned.
        loaders: that the batches are from, as far as they are known.
        structures: paths of what is a structure in any case: what holds the arguments of a call, say.
        root: what errors call the whole.
        prefix: what the paths of options begin with, which have no prefix for batches.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        loaders: Sequence[Any] = (),
        structures: Sequence[Path] = (),
        root: str = "batch",
        prefix: Path = (),
    ) -> None:
        self._declared = DeclaredDims(options or {}, prefix)
        sizes = {getattr(loader, "batch_size", None) for loader in loaders}
        self._size = sizes.pop() if len(sizes) == 1 else None
        self._structures = {*structures, *([()] if len(loaders) > 1 else [])}
        self._root = root
        self._roles: dict[Path, Role] = {}
        self._shared: dict[Path, int] = {}
        """Rows of tensors that are the same for all samples, as nobody has said otherwise."""

    @property
    def with_rows(self) -> list[Path]:
        """Tensors that have one row per sample."""
        return [path for path, role in self._roles.items() if role == "rows"]

    @property
    def has_shared(self) -> bool:
        """Whether tensors have rows that are not the samples, so that parts may not be what a step takes them for."""
        return bool(self._shared)

    def settle(self, batch: Batch, num: int) -> None:
        """Decide all by a batch of a known number of samples, if it has values of that length."""
        list(self._parts(batch, num))
        if not {"rows", "list"}.intersection(self._roles.values()):  # nodes of graphs, say
            self._roles.clear()
            self._shared.clear()

    def num_samples(self, batch: Batch) -> int | None:
        """Count the samples of a batch, the first of which decides; None where it holds nothing to count."""
        found = (length(part) for part, role in self._parts(batch) if role in ("rows", "list", "itself"))
        num = next((num for num in found if num is not None), None)
        if num is None and (num := self._first_count(batch)) is not None:
            list(self._parts(batch, num))
        return num

    def split(self, batch: Batch, sizes: Sizes) -> list[Chunk]:
        """Cut a batch; the table above tells what becomes of its values.

        Tensors are views of the batch's. An empty chunk has tensors of shape (0, ...).

        Args:
            batch: nested tensors, each of shape (N, ...).
            sizes: samples per chunk; they sum to N.

        Returns:
            One chunk per size, in order, of the batch's own type.

        Raises:
            PartsDiffer: a value can't be cut; the message names it.
        """

        def role_of(value: Any, path: Path) -> Role:
            role = self._role(value, path, sum(sizes))
            if is_array(value) and (before := self._shared.get(path, len(value))) != len(value):
                raise self._refuse(path, f"has {len(value)} rows, and had {before} in the first batch")
            return role

        return cut(batch, list(sizes), role_of, self._refuse)

    def _refuse(self, path: Path, what: str) -> PartsDiffer:
        return PartsDiffer(
            f"{called(path, self._root)} {what}. Give every value of the batch one row per sample; set "
            f"strategy.batch_dims={{{self._declared.key(path)}: none}} to give every device all of it; or put it into "
            "an object that defines split(sizes)."
        )

    def _parts(self, value: Any, num: int | None = None, path: Path = ()) -> Iterator[tuple[Any, Role]]:
        """Yield the values of a batch that are no structures; those that are new are decided by its samples."""
        role = self._role(value, path, num)
        if role != "structure":
            yield value, role
        for key, child in (children(value) or ()) if role == "structure" else ():
            yield from self._parts(child, num, (*path, key))

    def _role(self, value: Any, path: Path, num: int | None) -> Role:
        if not (is_array(value) or is_sequence(value)):
            is_shared = self._declared.word(path) == "shared"
            return "shared" if is_shared else "itself" if splits_itself(value) else "structure"
        if path not in self._roles and num is not None:
            self._roles[path] = self._decided(value, path, num)
        return self._roles.get(path, "structure")

    def _decided(self, value: Any, path: Path, num: int) -> Role:
        word: Any = self._declared.word(path)
        if word in REDUCTIONS or (word == "list" and is_array(value)):
            raise ConfigError(
                f"batch_dims={{{self._declared.key(path)}: {word}}} was given for {called(path, self._root)}, a "
                f"{type(value).__name__}. Give {'0' if is_array(value) else 'list'} or none."
            )
        if is_array(value):
            if word is None and len(value) != num:
                self._shared[path] = len(value)
            return word or ("rows" if len(value) == num else "shared")
        if word == "rows" or path in self._structures:
            return "structure"
        return word or ("list" if are_samples(value, num) else "structure")

    def _first_count(self, batch: Any) -> int | None:
        """N of the first batch, of which nothing is known."""
        found = sorted(self._lengths(batch), key=lambda one: one[0])
        if found and found[0][0] == 0:
            return found[0][1]
        lengths = [num for rank, num in found if rank == 1] or [num for _, num in found]
        return self._size if self._size in lengths else next(iter(lengths), None)

    def _lengths(self, value: Any, path: Path = (), in_list: bool = False) -> Iterator[tuple[int, int]]:
        """Yield the lengths of what may have samples, each after its rank.

        The user's word has rank 0, a tensor outside of lists 1, a list 2, the batch itself 3, a tensor in a list 4.
        """
        word, is_list = self._declared.word(path), is_sequence(value)
        if word == "shared":
            return
        if is_array(value) or splits_itself(value):
            if (num := length(value)) is not None:
                yield 0 if word else 4 if in_list else 1, num
            return
        if is_list and path not in self._structures and word != "rows":
            yield 0 if word else 2 if path else 3, len(value)
            in_list = bool(path)
        for key, child in (children(value) or ()) if not (is_list and word == "list") else ():
            yield from self._lengths(child, (*path, key), in_list)
