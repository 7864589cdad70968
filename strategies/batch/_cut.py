"""Cut the values of a batch by sizes, each by its role."""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core.errors import PartsDiffer
from .tree import SHARED, Path, called, children, is_array, is_sequence, rebuild, splits_itself

Role: TypeAlias = Literal["rows", "list", "shared", "structure"]
"""What a value is: one row per sample, one element per sample, the same for all samples, or a structure of values."""

RoleOf: TypeAlias = Callable[[Any, Path], Role]


def cut(
    value: Any, sizes: list[int], role_of: RoleOf, root: str, factors: Mapping[Path, int], path: Path = ()
) -> list[Any]:
    """Cut a value into one part per size, or refuse it by name.

    Args:
        factors: at paths where each size is so many times as large.
    """
    sizes = [size * factors.get(path, 1) for size in sizes]
    role, is_listed = role_of(value, path), is_array(value) or is_sequence(value)
    if role == "shared":
        return [value] * len(sizes)
    if is_listed and role != "structure":
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
            raise _refusal(value, called(path, root), f"tensor of layout {value.layout}")
        return list(value.split(sizes)) if isinstance(value, Tensor) else _slices(value, sizes)
    if splits_itself(value) and not is_listed:
        return _cut_by_itself(value, sizes, called(path, root))
    if children(value) is not None:
        return _cut_structure(value, sizes, role_of, root, factors, path)
    if not isinstance(value, (*SHARED, np.ndarray, Tensor)):
        raise _refusal(value, called(path, root))
    return [value] * len(sizes)


def _cut_structure(
    value: Any, sizes: list[int], role_of: RoleOf, root: str, factors: Mapping[Path, int], path: Path
) -> list[Any]:
    parts = [cut(child, sizes, role_of, root, factors, (*path, key)) for key, child in children(value) or []]
    return [rebuild(value, [part[i] for part in parts]) for i in range(len(sizes))]


def _cut_by_itself(value: Any, sizes: list[int], name: str) -> list[Any]:
    if callable(getattr(value, "to_data_list", None)):
        graphs = value.to_data_list()
        return [type(value).from_data_list(part) for part in _slices(graphs, sizes) if part]
    parts = list(value.split(sizes))
    if len(parts) != len(sizes):
        raise PartsDiffer(
            f"{name}: {type(value).__name__}.split({sizes}) returned {len(parts)} parts. Return one per size."
        )
    return parts


def _slices(value: Any, sizes: Iterable[int]) -> list[Any]:
    ends = list(accumulate(sizes))
    return [value[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _refusal(value: Any, name: str, what: str | None = None) -> PartsDiffer:
    return PartsDiffer(
        f"{name} is a {what or type(value).__name__}, which can't be cut into chunks. Use tensors, lists, dicts or "
        "dataclasses, or give it a method split(sizes) that returns one part per size."
    )
