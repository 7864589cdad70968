"""Join what chunks returned to what one device would have returned for the whole batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.no_value import no_value
from ..core.types import Sizes
from .batch_dims import DeclaredDims
from .tree import Path, called, children, is_array, is_sequence, option_key, rebuild, row_counts, walk


class ResultStructure:
    """How the results of one kind of step on the chunks of a batch become one.

    Args:
        step: its name, with which errors call the result, and the paths of options begin.
        options: what `verify_batch_dims` returned.
    """

    def __init__(self, step: str, options: Mapping[str, str] | None = None) -> None:
        self._step, self._declared = step, DeclaredDims(options or {}, (step,))
        self._known: dict[Path, str] = {}
        """Decisions about values, which hold for the whole run."""
        self._is_settled = False
        """Whether results were seen whose structure is certain; see `unequal`."""

    @property
    def decided(self) -> list[Any]:
        """What is known, as plain data, with which a resumed run cuts as this one does; names that are none are left
        out, and found again."""
        known = [[list(path), word] for path, word in self._known.items()]
        is_plain = all(isinstance(key, (str, int)) for path, _ in known for key in path)
        return [self._is_settled, known] if is_plain else [False, []]

    @decided.setter
    def decided(self, saved: Sequence[Any]) -> None:
        self._is_settled, known = saved
        self._known = {tuple(path): word for path, word in known}

    def is_declared(self, path: Path) -> bool:
        """Whether the user said what the value at a path is."""
        return self._declared.word(path) is not None

    def unequal(self, sizes: Sequence[int]) -> list[int]:
        """Move a sample from the last chunk to the first where all are of one size and results are not yet known.

        What is one row or element per sample differs in length between chunks of unequal sizes; what is a structure,
        or the same for all samples, does not. Results are equal however a batch is cut, so that this costs nothing.
        """
        used = [i for i, size in enumerate(sizes) if size]
        changed = list(sizes)
        if not self._is_settled and len(used) > 1 and len({sizes[i] for i in used}) == 1:
            changed[used[0]] += 1
            changed[used[-1]] -= 1
        return changed

    def join(self, results: Sequence[Any], sizes: Sizes, device: torch.device | None = None) -> Any:
        """Join the results of chunks: what one device would have returned for the whole batch.

        Args:
            results: one per chunk that had samples.
            sizes: samples per chunk.
            device: where joined tensors live; None takes the first chunk's.

        Raises:
            NoValueError: a value that can't be joined, or in two ways, is used later; the message names it.
        """
        used = [size for size in sizes if size]
        assert len(results) == len(used) > 0
        self._is_settled = self._is_settled or len(set(used)) > 1 or not _has_lengths(results[0])
        return _moved(results[0], device) if len(results) == 1 else self._joined(list(results), used, device, ())

    def _joined(self, parts: list[Any], sizes: list[int], device: torch.device | None, path: Path) -> Any:
        """Join values, or return what raises where somebody reads it; most results are read by nobody."""
        try:
            return self._value(parts, sizes, device, path)
        except ConfigError as exc:
            return no_value(str(exc))

    def _value(self, parts: list[Any], sizes: list[int], device: torch.device | None, path: Path) -> Any:
        first, reduction = parts[0], self._reduction(parts, sizes, path)
        if reduction == "structure":
            columns = [dict(children(part) or []) for part in parts]
            keys = list(columns[0])
            if any(list(column) != keys for column in columns):
                raise ConfigError(
                    f"{called(path, self._step)} differs between chunks in its keys or its length. Return one "
                    "structure from all."
                )
            joined = [self._joined([c[key] for c in columns], sizes, device, (*path, key)) for key in keys]
            return rebuild(first, joined)
        if reduction == "shared":
            return first
        if reduction in ("mean", "sum"):
            return _reduced(parts, sizes if reduction == "mean" else None, device)
        _verify_lengths(parts, sizes, self._step, path)
        if reduction == "list":
            return type(first)([element for part in parts for element in part])
        if isinstance(first, np.ndarray):
            return np.concatenate(parts)
        return torch.cat([part.to(device or first.device) for part in parts])

    def _reduction(self, parts: list[Any], sizes: list[int], path: Path) -> str:
        """How the values that chunks returned become one: `rows`, `list`, `structure`, `shared`, `mean` or `sum`."""
        first = parts[0]
        option = "sum" if path == ("loss_weight",) else self._declared.word(path)
        if option == "shared" and not isinstance(first, Tensor) and not are_equal(parts):
            raise ConfigError(
                f"{called(path, self._step)} differs between chunks, and batch_dims says that it is the same for all "
                "samples. Set it to list, sum or mean."
            )
        if option is not None:
            return "structure" if option == "rows" and not is_array(first) else option
        if is_array(first):
            return "rows"
        if is_sequence(first):
            return self._list_or_structure(parts, sizes, path)
        if children(first) is not None:
            return "structure"
        return self._reduction_of_leaf(parts, sizes, path)

    def _list_or_structure(self, parts: list[Any], sizes: list[int], path: Path) -> str:
        lengths = [len(part) if is_sequence(part) else -1 for part in parts]
        found = self._known.get(path)
        if found is None and len(set(sizes)) > 1:
            found = "list" if lengths == sizes else "structure"
            self._known[path] = found
        if found is not None:
            return found
        if lengths != sizes:
            return "structure"
        inside = [count for part in parts for _, count in row_counts(part)]
        if inside and all(count == sizes[0] for count in inside):
            key = self._declared.key(path)
            raise ConfigError(
                f"{called(path, self._step)} is a list of {sizes[0]} values of {sizes[0]} rows each from chunks of "
                f"{sizes[0]} samples: its elements may be samples, or its rows. Set strategy.batch_dims="
                f"{{{key}: list}} for one element per sample, or {{{key}: 0}} for one row per sample."
            )
        return "list"

    def _reduction_of_leaf(self, parts: list[Any], sizes: list[int], path: Path) -> str:
        """How numbers and other single values become one: a fraction is a mean over samples; a count is not known."""
        first = parts[0]
        if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
            return "mean"
        if isinstance(first, Tensor) or (isinstance(first, int) and not isinstance(first, bool)):
            if len(set(sizes)) > 1 and not isinstance(first, Tensor) and parts == sizes:
                self._known[path] = "sum"
            if self._known.get(path) == "sum" and parts == sizes:
                return "sum"
        elif are_equal(parts):
            return "shared"
        shown = " and ".join(str(part) for part in parts[:2]) if not isinstance(first, Tensor) else "an integer tensor"
        raise ConfigError(
            f"{called(path, self._step)} is {shown} in chunks of {' and '.join(map(str, sizes[:2]))} samples: it may "
            "be a sum over samples, a mean, or something else. Set strategy.batch_dims="
            f"{{{self._declared.key(path)}: sum, mean or none}}, or return a tensor with one row per sample."
        )


def _moved(value: Any, device: torch.device | None) -> Any:
    """The result of the only chunk that had samples, its tensors on `device`: what one device returns."""
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    items = children(value)
    if items is None:
        return value
    parts = [_moved(child, device) for _, child in items]
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
        parts = [part.to(device or parts[0].device) for part in parts]
    if weights is not None:
        parts = [part * weight for part, weight in zip(parts, weights, strict=True)]
    total = torch.stack(parts).sum(0) if isinstance(parts[0], Tensor) else sum(parts[1:], start=parts[0])
    return total if weights is None else total / sum(weights)


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


def _has_lengths(result: Any) -> bool:
    """Whether there are tensors, lists or integers in a result: what chunks of unequal sizes must explain."""
    return any(is_array(value) or is_sequence(value) or isinstance(value, int) for _, value in walk(result))
