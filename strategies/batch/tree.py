"""Walk, rebuild and cut nested batches: what a structure is made of, and what its values are called."""

import copy
import enum
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias, cast

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

Role: TypeAlias = Literal["rows", "list", "itself", "shared", "structure"]
"""What a value is: a row or an element per sample, what splits itself, the same for all samples, or a structure."""


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
        return int(value.num_graphs)  # its `len` is the number of its attributes
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


def cut(
    value: Any,
    sizes: list[int],
    role_of: Callable[[Any, Path], Role],
    refusal: Callable[[Path, str], PartsDiffer],
    path: Path = (),
) -> list[Any]:
    """Cut a value into one part per size, or refuse it by name."""
    role = role_of(value, path)
    if role == "shared":
        return [value] * len(sizes)
    if role != "structure":
        if (num := length(value)) not in (None, sum(sizes)):
            raise refusal(
                path, f"has {num} rows in a batch of {sum(sizes)} samples, so it can't be cut along dimension 0"
            )
        parts = _split(value, sizes)
        if len(parts) != len(sizes):
            raise refusal(path, f"is cut otherwise: {type(value).__name__}.split({sizes}) returned {len(parts)} parts")
        return parts
    if (items := children(value)) is not None:
        columns = [cut(child, sizes, role_of, refusal, (*path, key)) for key, child in items]
        return [rebuild(value, [column[i] for column in columns]) for i in range(len(sizes))]
    if isinstance(value, SHARED) or (isinstance(value, (Tensor, np.ndarray)) and not value.ndim):
        return [value] * len(sizes)
    raise refusal(path, f"is a {type(value).__name__}, which can't be cut into chunks")


def _split(value: Any, sizes: list[int]) -> list[Any]:
    graphs, kind = getattr(value, "to_data_list", None), cast(Any, type(value))
    if graphs is None and not isinstance(value, (list, tuple, np.ndarray)):
        return list(value.split(sizes))
    values, ends = value if graphs is None else graphs(), list(accumulate(sizes))
    parts = [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return parts if graphs is None else [kind.from_data_list(part) if part else None for part in parts]
