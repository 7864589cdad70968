"""Join what the parts of batches return, or append to lists, to what one device has for the whole batches.

tensor, array        rows of all parts
list                 elements of all parts; a structure, if its length is one number whatever the samples are
dict, tuple          each value by itself
fraction             mean over the samples
number of samples    sum; so is every whole number in lists, but for what is the same in all parts
anything else        what it is in all parts
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor

from ..core.no_value import no_value
from ..core.types import Sizes
from .batch_dims import DeclaredDims
from .tree import Path, called, children, is_array, is_sequence, rebuild, row_counts, walk

Batches: TypeAlias = Sequence[tuple[Sequence[Any], Sequence[float]]]
"""For each batch what its parts have at one place, and their samples."""


class _Unknown(Exception):  # the joiner's owner says what to do
    """A value of the whole batch does not follow from those of its parts; says why."""


@dataclass
class _Lengths:
    """Lengths, or whole numbers, that parts have at one place, and their samples; two of each are kept."""

    lengths: list[float] = field(default_factory=list[float])
    samples: list[float] = field(default_factory=list[float])
    are_samples: bool = True

    def see(self, length: float, num: float) -> None:
        """Learn those of a part."""
        self.are_samples = self.are_samples and length == num
        for known, one in (self.lengths, length), (self.samples, num):
            if len(known) < 2 and one not in known:
                known.append(one)

    @property
    def vary(self) -> bool:
        """Whether parts of unequal lengths, or numbers of samples, were seen."""
        return len(self.lengths) > 1 or len(self.samples) > 1


class Joiner:
    """Joins the values of parts, by what was seen of all that it has joined.

    Args:
        word: what the user said of the value at a path: `sum`, `mean`, `list`, `rows` or `shared`; None for nothing.
        unknown: what stands for a value that can't be joined, of its path and the reason; or raises.
        appended: whether steps append them to lists: then whole numbers add up, and a tuple is a structure unless its
            length follows the samples.
    """

    def __init__(
        self, word: Callable[[Path], str | None], unknown: Callable[[Path, str], Any], appended: bool = False
    ) -> None:
        self._word, self._unknown, self._appended = word, unknown, appended
        self.known: dict[Path, _Lengths] = {}

    def join(self, batches: Batches, path: Path = (), device: torch.device | None = None) -> list[Any]:
        """Join the values at a path: one for each batch, on a device, or on that of the first part."""
        try:
            return self._joined(batches, path, device)
        except _Unknown as exc:
            return [self._unknown(path, str(exc))] * len(batches)

    def _joined(self, batches: Batches, path: Path, device: torch.device | None) -> list[Any]:
        (first, *_), _ = batches[0]
        word, lengths = self._word(path), self.known.get(path, _Lengths())
        if is_listed := is_array(first) or is_sequence(first):
            lengths = self._seen(batches, path, len)
        if word in ("sum", "mean") and (is_array(first) or children(first) is None):
            return [_weighed(parts, sizes if word == "mean" else None, device) for parts, sizes in batches]
        if word == "shared":
            if not isinstance(first, Tensor) and not all(are_equal(parts) for parts, _ in batches):
                raise _Unknown("differs between parts, and batch_dims says that it is the same for all samples")
            return [parts[0] for parts, _ in batches]
        if is_array(first):
            if word is None and len(lengths.lengths) == 1 and not _may_be_rows(lengths):
                shown = " and ".join(f"{num:g}" for num in lengths.samples)
                raise _Unknown(f"has {lengths.lengths[0]} rows in parts of {shown} samples")
            return [_concatenated(parts, device) for parts, _ in batches]
        if is_listed and (word == "list" or (word is None and self._is_list(first, lengths))):
            return [type(first)([value for part in parts for value in part]) for parts, _ in batches]
        if children(first) is not None:
            return self._structures(batches, path, device)
        return self._leaves(batches, path, device)

    def _seen(self, batches: Batches, path: Path, length: Callable[[Any], float]) -> _Lengths:
        lengths = self.known.setdefault(path, _Lengths())
        for parts, sizes in batches:
            for part, num in zip(parts, sizes, strict=True):
                if type(part) is not type(parts[0]):
                    kinds = ", ".join(sorted({type(one).__name__ for one in parts}))
                    raise _Unknown(f"differs between parts in its type ({kinds})")
                lengths.see(length(part), num)
        return lengths

    def _is_list(self, first: Any, lengths: _Lengths) -> bool:
        """Whether a list, or a tuple, is no structure."""
        if lengths.vary or not lengths.are_samples:
            return lengths.are_samples or len(lengths.lengths) > 1
        if self._appended and type(first) is tuple:
            return False
        (num,) = lengths.lengths
        inside = [count for _, count in row_counts(first)]
        if inside and all(count == num for count in inside):
            raise _Unknown(
                f"is a list of {num:g} values of {num:g} rows each in parts of {num:g} samples: "
                "its elements may be samples (list), or its rows (0)"
            )
        return True

    def _structures(self, batches: Batches, path: Path, device: torch.device | None) -> list[Any]:
        items = [[dict(children(part) or ()) for part in parts] for parts, _ in batches]
        keys = list(items[0][0])
        if any(list(part) != keys for parts in items for part in parts):
            raise _Unknown("differs between parts in its keys or its length")
        sizes = [sizes for _, sizes in batches]
        columns = [
            self.join([([part[key] for part in parts], of) for parts, of in zip(items, sizes, strict=True)],
                      (*path, key), device)
            for key in keys
        ]  # fmt: skip
        return [rebuild(parts[0], [column[i] for column in columns]) for i, (parts, _) in enumerate(batches)]

    def _leaves(self, batches: Batches, path: Path, device: torch.device | None) -> list[Any]:
        (first, *others), sizes = batches[0]
        if is_fraction(first):
            return [_weighed(parts, sizes, device) for parts, sizes in batches]
        alike = not isinstance(first, Tensor) and all(are_equal(parts) for parts, _ in batches)
        if is_whole(first):
            are_samples = not isinstance(first, Tensor) and self._seen(batches, path, float).are_samples
            if (self._appended and (are_samples or not alike)) or (are_samples and self.known[path].vary):
                return [_weighed(parts, None, device) for parts, _ in batches]
            alike = alike and self._appended
        if alike:
            return [parts[0] for parts, _ in batches]
        shown = " and ".join(map(str, [first, *others[:1]])) if not isinstance(first, Tensor) else "an integer tensor"
        raise _Unknown(f"is {shown} in parts of {' and '.join(f'{num:g}' for num in sizes[:2])} samples")


class ResultStructure:
    """How the results of one kind of step on the chunks of a batch become one.

    Args:
        step: its name, with which errors call the result, and the paths of options begin.
        options: what `verify_batch_dims` returned.
    """

    def __init__(self, step: str, options: Mapping[str, str] | None = None) -> None:
        self._step, self._declared = step, DeclaredDims(options or {}, (step,))
        self._joiner = Joiner(self._said, self._no_value)
        self._is_settled = False
        """Whether results were seen whose structure is certain; see `unequal`."""

    @property
    def decided(self) -> list[Any]:
        """What is known, as plain data, with which a resumed run cuts as this one does; names that are none are left
        out, and found again."""
        known = [[list(path), *vars(lengths).values()] for path, lengths in self._joiner.known.items()]
        is_plain = all(isinstance(key, (str, int)) for path, *_ in known for key in path)
        return [self._is_settled, known] if is_plain else [False, []]

    @decided.setter
    def decided(self, saved: Sequence[Any]) -> None:
        is_settled, known = saved
        is_of_this_version = all(len(one) == 4 for one in known)
        self._is_settled = is_settled and is_of_this_version
        self._joiner.known = {tuple(path): _Lengths(*lengths) for path, *lengths in known if is_of_this_version}

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
            NoValueError: a value that can't be joined is used later; the message names it.
        """
        used = [size for size in sizes if size]
        assert len(results) == len(used) > 0
        self._is_settled = self._is_settled or len(set(used)) > 1 or not _has_lengths(results[0])
        if len(results) == 1:
            return results[0] if device is None else move_data_to_device(results[0], device)
        return self._joiner.join([(results, used)], (), device)[0]

    def _said(self, path: Path) -> str | None:
        return "sum" if path == ("loss_weight",) else self._declared.word(path)

    def _no_value(self, path: Path, why: str) -> Any:
        """What raises where somebody reads it: most results are read by nobody."""
        return no_value(
            f"{called(path, self._step)} {why}, so that it isn't known what it is of the whole batch. Return a mean, "
            "or a tensor with one row per sample; or set strategy."
            f"batch_dims={{{self._declared.key(path)}: sum}}, mean, list, 0 (rows) or none (the same in all parts)."
        )


def is_fraction(value: Any) -> bool:
    """Whether a value is a floating-point number, which is taken for a mean over samples; counts add up."""
    if isinstance(value, Tensor):
        return not value.dim() and value.is_floating_point()
    return isinstance(value, (float, np.floating))


def are_equal(parts: Sequence[Any]) -> bool:
    """Whether chunks returned the same value, which is no tensor."""
    try:
        return all(type(part) is type(parts[0]) and bool(part == parts[0]) for part in parts)
    except (RuntimeError, ValueError):
        return False  # arrays inside have no single truth value


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    if isinstance(value, Tensor):
        return not value.dim()
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _may_be_rows(lengths: _Lengths) -> bool:
    """Whether parts that all have as many rows have a multiple of their samples."""
    rows = lengths.lengths[0]
    return not rows or (len(lengths.samples) == 1 and not rows % lengths.samples[0])


def _concatenated(parts: Sequence[Any], device: torch.device | None) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return torch.cat([part.to(device or parts[0].device) for part in parts])


def _weighed(parts: Sequence[Any], sizes: Sequence[float] | None, device: torch.device | None) -> Any:
    """The mean over samples, or the sum."""
    if isinstance(parts[0], Tensor):
        parts = [part.to(device or parts[0].device) for part in parts]
    if sizes is not None:
        parts = [part * size for part, size in zip(parts, sizes, strict=True)]
    total = sum(parts[1:], start=parts[0])
    return total if sizes is None else total / sum(sizes)


def _has_lengths(result: Any) -> bool:
    """Whether there are tensors, lists or integers in a result: what chunks of unequal sizes must explain."""
    return any(is_array(value) or is_sequence(value) or isinstance(value, int) for _, value in walk(result))
