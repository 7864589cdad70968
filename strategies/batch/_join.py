"""Join what chunks returned to what one device would have returned for the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from .tree import Path, called, children, is_array, is_sequence, option_key, rebuild

Reduction: TypeAlias = str
"""How the values of chunks become one: `rows`, `list`, `structure`, `shared`, `mean` or `sum`."""

ReductionOf: TypeAlias = Callable[[list[Any], list[int], Path], Reduction]


def join_parts(
    parts: list[Any], sizes: list[int], reduction_of: ReductionOf, root: str, device: torch.device | None, path: Path
) -> Any:
    """Join one value per chunk, or refuse the value by name."""
    first, reduction = parts[0], reduction_of(parts, sizes, path)
    if reduction == "structure":
        columns = [dict(children(part) or []) for part in parts]
        keys = list(columns[0])
        if any(list(column) != keys for column in columns):
            raise ConfigError(
                f"{called(path, root)} differs between chunks in its keys or its length. Return one structure from all."
            )
        together = {key: [column[key] for column in columns] for key in keys}
        joined = [join_parts(together[key], sizes, reduction_of, root, device, (*path, key)) for key in keys]
        return rebuild(first, joined)
    if reduction == "shared":
        return first
    if reduction in ("mean", "sum"):
        return _reduced(parts, sizes if reduction == "mean" else None, device)
    _verify_lengths(parts, sizes, root, path)
    if reduction == "list":
        return type(first)([element for part in parts for element in part])
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    return torch.cat([part.to(device or first.device) for part in parts])


def moved(value: Any, device: torch.device | None) -> Any:
    """The result of the only chunk that had samples, its tensors on `device`: what one device returns."""
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    items = children(value)
    if items is None:
        return value
    parts = [moved(child, device) for _, child in items]
    is_new = any(part is not child for part, (_, child) in zip(parts, items, strict=True))
    return rebuild(value, parts) if is_new else value


def are_equal(parts: Sequence[Any]) -> bool:
    """Whether chunks returned the same value, which is no tensor."""
    try:
        return all(type(part) is type(parts[0]) and bool(part == parts[0]) for part in parts)
    except (RuntimeError, ValueError):
        return False  # arrays inside have no single truth value


def _reduced(parts: list[Any], weights: list[int] | None, device: torch.device | None) -> Any:
    if isinstance(parts[0], Tensor):
        where = device or parts[0].device
        moved_parts = [part.to(where) for part in parts]
        if weights is None:
            return torch.stack(moved_parts).sum(0)
        weighted = [part * weight for part, weight in zip(moved_parts, weights, strict=True)]
        return torch.stack(weighted).sum(0) / sum(weights)
    if weights is None:
        return sum(parts[1:], start=parts[0])
    return sum(part * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights)


def _verify_lengths(parts: list[Any], sizes: list[int], root: str, path: Path) -> None:
    if not all(is_array(part) or is_sequence(part) for part in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise ConfigError(f"{called(path, root)} differs between chunks in its type ({kinds}). Return one type.")
    lengths = [len(part) for part in parts]
    if lengths != sizes:
        raise ConfigError(
            f"{called(path, root)} has {lengths} {'rows' if is_array(parts[0]) else 'elements'} from chunks of {sizes} "
            "samples, so it can't be joined along dimension 0. Return one row per sample, or a scalar (a mean over the "
            f"samples); or set strategy.batch_dims={{{option_key((root, *path))}: none, mean or sum}}."
        )
