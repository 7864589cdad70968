"""Decide, once per run and value, what in a batch is samples: by a convention, unless the option `batch_dims` says it.

a value of a batch of N samples       is
tensor or array of N rows             cut by rows
list or tuple of N elements           cut between its elements
object with `split(sizes)`            cut by itself; so are torch_geometric's batches, by `to_data_list`
mapping, namedtuple, dataclass        a structure; so are other lists, and those in which all is as long as the batch
anything else                         shared: all chunks have it

Where a dataset gives samples by index, a batch of 7 decides (`settle`), else the first one. There N is the number of
rows of a tensor outside of lists, or without these the length of a list: the loader's `batch_size`, if one is as long,
else that of the first. What was decided for a path (`boxes`, `views.0`) holds for the whole run; a shared tensor whose
number of rows then becomes another is not cut, but refused by name.
"""

import copy
import enum
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..core.errors import ConfigError, PartsDiffer
from ..core.types import Batch, Chunk, Sizes

SHARED = (str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, np.generic, type(None))
"""Values that hold no samples: every chunk has them."""

Path: TypeAlias = tuple[Any, ...]
"""The keys, indices and field names from a batch to a value in it."""

Role: TypeAlias = Literal["rows", "list", "itself", "shared", "structure"]
"""What a value is: a row or an element per sample, what splits itself, the same for all samples, or a structure."""


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """The named parts of a structure; None for a leaf."""
    if isinstance(value, PackedSequence):
        return None  # a namedtuple, but its rows are time steps
    if (names := getattr(value, "_fields", None)) is not None and isinstance(value, tuple):
        return list(zip(names, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield a value and all that is in it, with their paths, each before its parts."""
    yield path, value
    for key, child in children(value) or ():
        yield from walk(child, (*path, key))


def rebuild(value: Any, parts: list[Any]) -> Any:
    """A structure like `value`, its parts replaced in order."""
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return parts
    rebuilt = copy.copy(value)
    for (key, _), part in zip(children(value) or [], parts, strict=True):
        if isinstance(value, Mapping):
            rebuilt[key] = part
        else:
            object.__setattr__(rebuilt, key, part)  # a frozen dataclass too
    return rebuilt


def splits_itself(value: Any) -> bool:
    """Whether a value has `split(sizes)` (that of tensors and strings is another), or is a batch of torch_geometric."""
    if isinstance(value, (Tensor, str, bytes)):
        return False
    return callable(getattr(value, "split", None)) or callable(getattr(value, "to_data_list", None))


def length(value: Any) -> int | None:
    """The samples of a value, if it has any: its rows, elements or graphs."""
    if callable(getattr(value, "to_data_list", None)):
        return int(value.num_graphs)  # its `len` counts attributes
    return len(value) if hasattr(value, "__len__") else None


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or array with rows."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided and not value.is_nested and value.dim() > 0
    return isinstance(value, np.ndarray) and value.ndim > 0


def is_sequence(value: Any) -> bool:
    """Whether a value is a plain list or tuple, whose elements may be samples."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def are_samples(values: Any, num: int | None) -> bool:
    """Whether a list of `num` elements has one per sample, rather than tensors and lists of samples."""
    lengths = {length for value in values for length in _lengths(value)}
    return len(values) == num and lengths - {None} != {num}


def _lengths(value: Any) -> Iterator[int | None]:
    """The lengths of the tensors and lists that a value is, or holds outside of lists."""
    if is_array(value) or is_sequence(value) or splits_itself(value):
        yield length(value)
    else:
        for _, child in children(value) or ():
            yield from _lengths(child)


def called(path: Path, root: str) -> str:
    """How an error names a value: `batch['boxes'][0]`."""
    return root + "".join(f"[{key!r}]" for key in path)


def split_itself(value: Any, sizes: list[int]) -> list[Any]:
    """Cut a value by its rows, elements or graphs, or as it does itself."""
    if isinstance(value, Tensor):
        return list(value.split_with_sizes(sizes))
    graphs, kind = getattr(value, "to_data_list", None), cast(Any, type(value))
    if graphs is None and not isinstance(value, (list, tuple, np.ndarray)):
        return list(value.split(sizes))
    values, ends = value if graphs is None else graphs(), list(accumulate(sizes))
    parts = [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return parts if graphs is None else [kind.from_data_list(part) if part else None for part in parts]


BatchDims: TypeAlias = Mapping[Any, Any]
"""The option `batch_dims`: for the path of a value `list`, `none` or 0; of a result also `sum` or `mean`."""

REDUCTIONS = ("sum", "mean")

_WORDS: dict[Any, str] = {"list": "list", "none": "shared", None: "shared", 0: "rows", "0": "rows"}


def verify_batch_dims(dims: BatchDims | None, strategy: str) -> dict[str, str]:
    """Read the option `batch_dims`: for each path the role (or the reduction) of its value; refuse unknown words."""
    words = _WORDS | {word: word for word in REDUCTIONS}
    for key, word in (dims or {}).items():
        if word not in words or isinstance(word, bool):
            raise ConfigError(
                f"{strategy}: batch_dims={{{key}: {word}}} is unknown. Choose one of list (one element per sample), "
                "none (the same for all samples), 0 (tensors with one row per sample); for results also sum, mean."
            )
    return {str(key): words[word] for key, word in (dims or {}).items()}


@dataclass(frozen=True)
class DeclaredDims:
    """What `verify_batch_dims` returned; `prefix` is what paths in it begin with, which have none for batches."""

    words: Mapping[str, str]
    prefix: Path

    def key(self, path: Path) -> str:
        """How an option names a path, `boxes.0`; the whole batch is `batch`."""
        return ".".join(map(str, (*self.prefix, *path))) or "batch"

    def word(self, path: Path) -> str | None:
        """What the user said of a path; 0 for a structure is said of all tensors in it."""
        said = [self.words.get(self.key(path[:i])) for i in range(len(path) + 1)] if self.words else [None]
        return said[-1] or ("rows" if "rows" in said else None)


def num_samples(batch: Batch) -> int | None:
    """Count the samples of a batch of which nothing else is known, for what is only shown; None without any."""
    return BatchStructure().num_samples(batch)


class BatchStructure:
    """What the values of the batches of one loader are.

    Args:
        options: what `verify_batch_dims` returned.
        size: the loader's `batch_size`, if it is known.
        root: what errors call the whole.
        prefix: see `DeclaredDims`.
    """

    def __init__(
        self, options: Mapping[str, str] | None = None, size: int | None = None, root: str = "batch", prefix: Path = ()
    ) -> None:
        self._declared, self._size, self._root = DeclaredDims(options or {}, prefix), size, root
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
        if num is None and (ranked := sorted(self._lengths(batch), key=lambda one: one[0])):
            rank, num = ranked[0]
            if rank and self._size in [num for own, num in ranked if own == 1 or rank > 1]:
                num = self._size
            list(self._parts(batch, num))
        return num

    def split(self, batch: Batch, sizes: Sizes) -> list[Chunk]:
        """Cut a batch into chunks of its own type, one per size, of views; raises PartsDiffer, which names a value."""
        return self._cut(batch, list(sizes), sum(sizes), ())

    def _cut(self, value: Any, sizes: list[int], num: int, path: Path) -> list[Any]:
        role = self._role(value, path, num)
        if role == "shared":
            if is_array(value) and (before := self._shared.get(path, len(value))) != len(value):
                raise self._refuse(path, f"has {len(value)} rows, and had {before} in the first batch")
            return [value] * len(sizes)
        if role != "structure":
            if (own := length(value)) not in (None, num):
                raise self._refuse(
                    path, f"has {own} rows in a batch of {num} samples, so it can't be cut along dimension 0"
                )
            parts = split_itself(value, sizes)
            if len(parts) != len(sizes):
                what = f"is cut otherwise: {type(value).__name__}.split({sizes}) returned {len(parts)} parts"
                raise self._refuse(path, what)
            return parts
        if (items := children(value)) is not None:
            columns = [self._cut(child, sizes, num, (*path, key)) for key, child in items]
            return [rebuild(value, [column[i] for column in columns]) for i in range(len(sizes))]
        if isinstance(value, SHARED) or (isinstance(value, (Tensor, np.ndarray)) and not value.ndim):
            return [value] * len(sizes)
        raise self._refuse(path, f"is a {type(value).__name__}, which can't be cut into chunks")

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
        if word == "rows":
            return "structure"
        return word or ("list" if are_samples(value, num) else "structure")

    def _lengths(self, value: Any, path: Path = (), in_list: bool = False) -> Iterator[tuple[int, int]]:
        """Yield the lengths of what may have samples in a batch of which nothing is known, each after its rank.

        The user's word has rank 0, a tensor outside of lists 1, a list 2, the batch itself 3, a tensor in a list 4.
        """
        word, is_list = self._declared.word(path), is_sequence(value)
        is_leaf = is_array(value) or splits_itself(value)
        num = length(value) if is_leaf or (is_list and word != "rows") else None
        if word != "shared" and num is not None:
            yield 0 if word else (4 if in_list else 1) if is_leaf else (2 if path else 3), num
        if not (is_leaf or word == "shared" or (is_list and word == "list")):
            for key, child in children(value) or ():
                yield from self._lengths(child, (*path, key), in_list or (is_list and bool(path)))
