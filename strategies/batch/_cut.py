"""Cut the values of a batch by sizes, each by its role."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core.errors import PartsDiffer
from .tree import SHARED, Path, children, is_array, is_sequence, length, rebuild, splits_itself

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
        return [type(value).from_data_list(part) for part in _slices(graphs, sizes) if part]
    parts = list(value.split(sizes))
    if len(parts) != len(sizes):
        raise refusal(path, f"is cut otherwise: {type(value).__name__}.split({sizes}) returned {len(parts)} parts")
    return parts


def _slices(value: Any, sizes: Iterable[int]) -> list[Any]:
    ends = list(accumulate(sizes))
    return [value[start:end] for start, end in zip([0, *ends], ends, strict=False)]
