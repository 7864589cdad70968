"""Cut nested batches into chunks by sizes, and join the chunks' results.

a value in a batch of N samples                     becomes
tensor or array of shape (N, ...)                   its rows
list or tuple of N values, not N-row tensors        its elements (strings, images of unequal size)
mapping, other list or tuple, dataclass             the same structure, cut inside
object with `split(sizes)`                          what its `split` returns
pandas Index, as names of a tensor's columns        shared by every chunk; cut where it has N entries and names no axis
None, number, string, tensor of shape ()            shared by every chunk
anything else                                       refused by name
"""

import copy
import enum
import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..core.errors import ConfigError
from ..core.types import Batch, Chunk, Sizes

_SHARED = (str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, np.generic, type(None))
_Items: TypeAlias = list[tuple[Any, Any]]
_Kind: TypeAlias = Literal["samples", "structure", "either"]


def num_samples(batch: Batch) -> int | None:
    """Count the samples of a batch: the rows of the first tensor found, else the length of the first plain sequence.

    Args:
        batch: nested tensors, each of shape (N, ...); or lists of N strings or numbers; or an object with `split` and
            a length.

    Returns:
        N, or None where the batch holds nothing to count.
    """
    count = next((rows for _, rows in _rows(batch, "batch")), None)
    return count if count is not None else next(_plain_lengths(batch), None)


def split(batch: Batch, sizes: Sizes) -> list[Chunk]:
    """Cut a batch along dimension 0; the table above shows how each kind of value is cut.

    Tensors are views of the batch's. An empty chunk has tensors of shape (0, ...).

    Args:
        batch: nested tensors, each of shape (N, ...).
        sizes: samples per chunk; they sum to N.

    Returns:
        One chunk per size, in order, of the batch's own type; chunk i has tensors of shape (sizes[i], ...).

    Raises:
        ConfigError: a value can't be cut, or tensors disagree on N; the message names it.
    """
    num = sum(sizes)
    if isinstance(batch, (list, tuple)) and next(_rows(batch, "batch"), None) is not None:
        return _split_structure(batch, list(sizes), num, "batch")  # two tensors are not two samples
    return _split(batch, list(sizes), num, "batch")


def join(chunks: Sequence[Chunk], sizes: Sizes, device: torch.device | None = None) -> Any:
    """Join the results of chunks; the inverse of `split`.

    Args:
        chunks: one result per chunk, all of one structure; per-sample tensors have shape (sizes[i], ...).
        sizes: samples per chunk.
        device: where joined tensors live; None takes the first chunk's.

    Returns:
        The same structure: rows and per-sample lists in order; numbers and tensors of shape () are means weighted by
        the sizes; other values, equal in all chunks, are taken from the first.

    Raises:
        ConfigError: a value can't be joined; the message names it.
    """
    assert len(chunks) == len(sizes) > 0
    return _join(list(chunks), list(sizes), "output", device)


def _children(value: Any) -> _Items | None:
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


def _rebuild(value: Any, parts: list[Any]) -> Any:
    """Build a structure like `value` with its parts replaced in order."""
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return parts
    rebuilt = copy.copy(value)
    for (key, _), part in zip(_children(value) or [], parts, strict=True):
        if isinstance(value, Mapping):
            rebuilt[key] = part
        else:
            object.__setattr__(rebuilt, key, part)  # a frozen dataclass too
    return rebuilt


def _splits_itself(value: Any) -> bool:
    return not isinstance(value, (Tensor, str, bytes)) and callable(getattr(value, "split", None))


def _named(name: str, key: Any) -> str:
    return f"{name}[{key!r}]"


def _rows(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Names and numbers of rows of all tensors, arrays and objects with `split` inside a value."""
    if _splits_itself(value):
        if hasattr(value, "__len__"):
            yield name, len(value)
    elif isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield name, value.shape[0]
    else:
        for key, child in _children(value) or []:
            yield from _rows(child, _named(name, key))


def _plain_lengths(value: Any) -> Iterator[int]:
    """Lengths of the sequences inside a value that hold no structure: strings or numbers."""
    children = _children(value) or []
    if isinstance(value, (list, tuple)) and children and all(_children(child) is None for _, child in children):
        yield len(value)
    for _, child in children:
        yield from _plain_lengths(child)


def _kind(value: Any, num: int) -> _Kind:
    """Classify the elements of a list: samples, parts of a structure (each holding all samples), or either."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or len(value) != num:
        return "structure"
    rows = [count for _, count in _rows(value, "")]
    if not rows or any(count != num for count in rows) or isinstance(value[0], Mapping):
        return "samples"
    return "either"


def _holds_samples(value: Any, num: int, name: str) -> bool:
    """Whether to cut a list inside a batch between its elements; see `_kind`.

    Samples of one shape would have been stacked, and samples have equal numbers of dimensions.
    """
    kind = _kind(value, num)
    if kind != "either":
        return kind == "samples"
    shapes = {element.shape for element in value if isinstance(element, Tensor)}
    if len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1:
        raise ConfigError(
            f"{name} is a list of {num} tensors of {num} rows each in a batch of {num} samples: either its "
            "elements or its rows may be the samples. Use a dict for the rows, or an object that defines "
            "split(sizes) for samples."
        )
    return False


def _split(value: Any, sizes: list[int], num: int, name: str) -> list[Any]:
    if isinstance(value, Tensor):
        return _split_tensor(value, sizes, num, name)
    if _splits_itself(value):
        return _split_by_itself(value, sizes, name)
    if isinstance(value, np.ndarray) and value.ndim:
        _verify_rows(value.shape[0], num, name)
        return _slices(value, sizes)
    if _holds_samples(value, num, name):
        return _slices(value, sizes)
    return _split_structure(value, sizes, num, name)


def _split_structure(value: Any, sizes: list[int], num: int, name: str) -> list[Any]:
    children = _children(value)
    if children is not None:
        parts = [
            _split_labels(child, children, sizes, num)
            if _is_labels(child)
            else _split(child, sizes, num, _named(name, key))
            for key, child in children
        ]
        return [_rebuild(value, [part[i] for part in parts]) for i in range(len(sizes))]
    if not isinstance(value, (*_SHARED, np.ndarray)):
        raise _refusal(value, name)
    return [value] * len(sizes)


def _is_labels(value: Any) -> bool:
    pandas = sys.modules.get("pandas")  # not a dependency: imported only if a batch can hold its objects
    return pandas is not None and isinstance(value, pandas.Index)


def _split_labels(labels: Any, beside: _Items, sizes: list[int], num: int) -> list[Any]:
    """Share column labels; cut sample labels: those with N entries that match no other axis of a sibling tensor."""
    shapes = [value.shape[1:] for _, value in beside if isinstance(value, (Tensor, np.ndarray))]
    if len(labels) != num or any(num in shape for shape in shapes):
        return [labels] * len(sizes)
    return _slices(labels, sizes)


def _split_tensor(value: Tensor, sizes: list[int], num: int, name: str) -> list[Tensor]:
    if not value.dim():
        return [value] * len(sizes)
    if value.layout is not torch.strided or value.is_nested:
        raise _refusal(value, name, f"tensor of layout {value.layout}")
    _verify_rows(value.shape[0], num, name)
    return list(value.split(sizes))


def _split_by_itself(value: Any, sizes: list[int], name: str) -> list[Any]:
    parts = list(value.split(sizes))
    if len(parts) != len(sizes):
        raise ConfigError(
            f"{name}: {type(value).__name__}.split({sizes}) returned {len(parts)} parts. Return one per size."
        )
    return parts


def _slices(value: Any, sizes: Iterable[int]) -> list[Any]:
    ends = list(accumulate(sizes))
    return [value[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _verify_rows(rows: int, num: int, name: str) -> None:
    if rows != num:
        raise ConfigError(
            f"{name} has {rows} rows in a batch of {num} samples, so it can't be cut along dimension 0. Give every "
            "tensor of the batch one row per sample, or put it into an object that defines split(sizes)."
        )


def _refusal(value: Any, name: str, what: str | None = None) -> ConfigError:
    return ConfigError(
        f"{name} is a {what or type(value).__name__}, which can't be cut into chunks. Use tensors, lists, dicts or "
        "dataclasses, or give it a method split(sizes) that returns one part per size."
    )


def _join(parts: list[Any], sizes: list[int], name: str, device: torch.device | None) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return _join_tensors(parts, sizes, name, device or first.device)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(parts)
    if isinstance(first, float):
        return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    kinds = {_kind(part, size) for part, size in zip(parts, sizes, strict=True)}
    if "structure" not in kinds and "samples" in kinds:
        return type(first)([element for part in parts for element in part])
    children = _children(first)
    if children is None:
        return first
    return _join_structures(parts, children, sizes, name, device)


def _join_structures(
    parts: list[Any], children: _Items, sizes: list[int], name: str, device: torch.device | None
) -> Any:
    keys = [key for key, _ in children]
    columns = [dict(_children(part) or []) for part in parts]
    if any(list(column) != keys for column in columns):
        raise ConfigError(f"{name} differs between chunks in its keys or its length. Return one structure from all.")
    joined = [_join([column[key] for column in columns], sizes, _named(name, key), device) for key in keys]
    return _rebuild(parts[0], joined)


def _join_tensors(parts: list[Tensor], sizes: list[int], name: str, device: torch.device) -> Tensor:
    if not parts[0].dim():
        weights = torch.tensor(sizes, device=device)
        return (torch.stack([part.to(device) for part in parts]) * weights).sum() / sum(sizes)
    rows = [part.shape[0] for part in parts]
    if rows != sizes:
        raise ConfigError(
            f"{name} has {rows} rows from chunks of {sizes} samples, so it can't be joined along dimension 0. Return "
            "one row per sample, or a scalar (a mean over the samples)."
        )
    return torch.cat([part.to(device) for part in parts])
