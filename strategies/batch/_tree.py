"""Walk and rebuild nested batches: what a structure is made of, and what its values are called."""

import copy
import enum
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

SHARED = (str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, np.generic, type(None))
"""Values that hold no samples: every chunk has them."""

Path: TypeAlias = tuple[Any, ...]
"""The keys, indices and field names from a batch to a value in it."""

Items: TypeAlias = list[tuple[Any, Any]]


def children(value: Any) -> Items | None:
    """The named parts of a structure; None for a leaf."""
    if isinstance(value, PackedSequence):
        return None  # a namedtuple, but its rows are time steps
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(name, getattr(value, name)) for name in value._fields]  # pyright: ignore[reportAttributeAccessIssue]  # a namedtuple
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


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
    """Whether a value defines `split(sizes)`; tensors and strings have another `split`."""
    return not isinstance(value, (Tensor, str, bytes)) and callable(getattr(value, "split", None))


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or array with rows."""
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def is_sequence(value: Any) -> bool:
    """Whether a value is a plain list or tuple, whose elements may be samples."""
    return isinstance(value, (list, tuple)) and children(value) is not None and not hasattr(value, "_fields")


def row_counts(value: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Paths and numbers of rows of all tensors, arrays and objects with `split` inside a value."""
    if splits_itself(value):
        if hasattr(value, "__len__"):
            yield path, len(value)
    elif isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield path, value.shape[0]
    else:
        for key, child in children(value) or []:
            yield from row_counts(child, (*path, key))


def plain_lengths(value: Any) -> Iterator[int]:
    """Lengths of the sequences inside a value that hold no structure: strings or numbers."""
    parts = children(value) or []
    if isinstance(value, (list, tuple)) and parts and all(children(child) is None for _, child in parts):
        yield len(value)
    for _, child in parts:
        yield from plain_lengths(child)


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
