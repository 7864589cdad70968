"""Walk, rebuild and cut nested batches: what a structure is made of, and what its values are called."""

import copy
import enum
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..core.errors import PartsDiffer

SHARED = (str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, np.generic, type(None))
"""Values that hold no samples: every chunk has them."""

Path: TypeAlias = tuple[Any, ...]
"""The keys, indices and field names from a batch to a value in it."""

Items: TypeAlias = list[tuple[Any, Any]]


def children(value: Any) -> Items | None:
    """The named parts of a structure; None for a leaf."""
    if isinstance(value, PackedSequence):
        return None  # a namedtuple, but its rows are time steps
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(name, getattr(value, name)) for name in value._fields]  # pyright: ignore[reportAttributeAccessIssue]  # a namedtuple
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def walk(value: Any, into: Callable[[Any], Items | None] = children, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield a value and all that is in it, with their paths, each before its parts.

    Args:
        into: the named parts of a value; None for one whose parts are left out.
    """
    yield path, value
    for key, child in into(value) or ():
        yield from walk(child, into, (*path, key))


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
    """Whether a value can be cut by its own methods.

    Either by `split(sizes)` (tensors and strings have another), or by `to_data_list()` as torch_geometric's batches.
    """
    if isinstance(value, (Tensor, str, bytes)):
        return False
    return callable(getattr(value, "split", None)) or callable(getattr(value, "to_data_list", None))


def length(value: Any) -> int | None:
    """The samples of a value, if it has any: its rows, elements or graphs."""
    if callable(getattr(value, "to_data_list", None)):
        return int(value.num_graphs)  # its `len` is the number of its attributes
    return len(value) if hasattr(value, "__len__") else None


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or array with rows.

    Raises:
        ConfigError: it is a nested tensor of strided layout, which torch gives neither a shape nor a length.
    """
    if isinstance(value, Tensor) and value.is_nested and value.layout is torch.strided:
        raise PartsDiffer(
            "a batch has a nested tensor of layout torch.strided, whose samples can't be counted or cut. Use a list "
            "with one tensor per sample, or a padded tensor and the lengths of the samples."
        )
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def is_sequence(value: Any) -> bool:
    """Whether a value is a plain list or tuple, whose elements may be samples."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def row_counts(value: Any) -> Iterator[tuple[Path, int]]:
    """Paths and numbers of rows of all tensors, arrays and objects with `split` inside a value."""
    for path, part in walk(value, lambda part: None if splits_itself(part) else children(part)):
        count = length(part) if is_array(part) or splits_itself(part) else None
        if count is not None:
            yield path, count


def plain_length(value: Any) -> int | None:
    """Length of the first sequence inside a value that holds no structure: strings or numbers; None without any."""
    for _, part in walk(value):
        parts = (children(part) if isinstance(part, (list, tuple)) else None) or ()
        if parts and all(children(child) is None for _, child in parts):
            return len(parts)
    return None


def at(value: Any, path: Path) -> Any:
    """The value at a path, of whatever a list may hold more or less.

    Raises:
        KeyError: there is none.
    """
    for key in path:
        value = dict(children(value) or [])[key]
    return value


def called(path: Path, root: str) -> str:
    """How an error names a value: `batch['boxes'][0]`."""
    return root + "".join(f"[{key!r}]" for key in path)


def option_key(path: Path) -> str:
    """How an option names a value: `boxes.0`."""
    return ".".join(map(str, path))


Role: TypeAlias = Literal["rows", "list", "shared", "structure"]
"""What a value is: one row per sample, one element per sample, the same for all samples, or a structure of values."""

RoleOf: TypeAlias = Callable[[Any, Path], Role]


def cut(
    value: Any, sizes: list[int], role_of: RoleOf, refusal: Callable[[Path, str], PartsDiffer], path: Path = ()
) -> list[Any]:
    """Cut a value into one part per size, or refuse it by name."""
    role, is_listed = role_of(value, path), is_array(value) or is_sequence(value)
    if role == "shared":
        return [value] * len(sizes)
    if (is_listed and role != "structure") or (splits_itself(value) and not is_listed):
        if (num := length(value)) not in (None, sum(sizes)):
            raise refusal(
                path, f"has {num} rows in a batch of {sum(sizes)} samples, so it can't be cut along dimension 0"
            )
        if not is_listed:
            return _cut_by_itself(value, sizes, refusal, path)
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
            raise refusal(path, f"is a tensor of layout {value.layout}, which can't be cut into chunks")
        return list(value.split(sizes)) if isinstance(value, Tensor) else _slices(value, sizes)
    if (items := children(value)) is not None:
        parts = [cut(child, sizes, role_of, refusal, (*path, key)) for key, child in items]
        return [rebuild(value, [part[i] for part in parts]) for i in range(len(sizes))]
    if not isinstance(value, (*SHARED, np.ndarray, Tensor)):
        raise refusal(path, f"is a {type(value).__name__}, which can't be cut into chunks")
    return [value] * len(sizes)


def _cut_by_itself(value: Any, sizes: list[int], refusal: Callable[[Path, str], PartsDiffer], path: Path) -> list[Any]:
    if callable(getattr(value, "to_data_list", None)):
        graphs = value.to_data_list()
        return [type(value).from_data_list(part) if part else None for part in _slices(graphs, sizes)]
    parts = list(value.split(sizes))
    if len(parts) != len(sizes):
        raise refusal(path, f"is cut otherwise: {type(value).__name__}.split({sizes}) returned {len(parts)} parts")
    return parts


def _slices(value: Any, sizes: Iterable[int]) -> list[Any]:
    ends = list(accumulate(sizes))
    return [value[start:end] for start, end in zip([0, *ends], ends, strict=False)]
