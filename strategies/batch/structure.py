"""Decide, once per run and value, which dimension of a batch's values is samples.

a value of a batch of N samples       is                           decided by
tensor or array                       rows, or shared              evidence; else it has one row per sample
list or tuple                         list, structure, or shared   evidence; else asked for, if as long as the batch
mapping, namedtuple, dataclass        structure
object with `split(sizes)`            cut by itself
number, string, tensor of shape ()    shared

Evidence is, first to last: the option `batch_dims`; torch's own collate function, which stacks every tensor; two
batches of other sizes that the loader's collate function makes of its dataset's samples (what grows with them is
samples, what does not is shared). A list that can still be read in two ways is refused by name. What was decided for a
path (`boxes`, `views.0`) holds for the whole run.
"""

import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.types import Batch, Chunk, Sizes
from ._cut import Role, cut
from .batch_dims import REDUCTIONS, DeclaredDims
from .evidence import Evidence
from .tree import Path, at, called, children, is_array, is_sequence, plain_length, row_counts, splits_itself


def num_samples(batch: Batch) -> int | None:
    """Count the samples of a batch: the rows of the first tensor found, else the length of the first plain sequence.

    For what is only shown. What is cut or weighed is counted by `BatchStructure.num_samples`.

    Args:
        batch: nested tensors, each of shape (N, ...); or lists of N strings or numbers; or an object with `split` and
            a length.

    Returns:
        N, or None where the batch holds nothing to count.
    """
    count = next((rows for _, rows in row_counts(batch)), None)
    return plain_length(batch) if count is None else count


_Reached: TypeAlias = tuple[Path, Any, str | None]
"""A value of a batch: its path, the value, and what is known of it."""


class BatchStructure:
    """What the values of the batches of one loader are.

    Args:
        options: what `verify_batch_dims` returned.
        evidence: what is known before a batch is cut.
        root: what errors call the whole.
        prefix: what the paths of options begin with, which have no prefix for batches.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        evidence: Evidence | None = None,
        root: str = "batch",
        prefix: Path = (),
    ) -> None:
        self._declared = DeclaredDims(options or {}, prefix)
        self._evidence = evidence or Evidence()
        self._root = root
        self._roles: dict[tuple[Path, bool], Any] = {}
        self._asks = False
        self._assumed: dict[Path, Any] | None = {}

    def num_samples(self, batch: Batch) -> int | None:
        """Count the samples of a batch.

        Returns:
            N, or None where the batch holds nothing to count.

        Raises:
            ConfigError: values disagree on N, or can be read in two ways; the message names them.
        """
        counts = self._counts(self._learn(batch))
        for path, count in counts:
            if count != counts[0][1]:
                first = called(counts[0][0], self._root)
                raise ConfigError(
                    f"{called(path, self._root)} has {count} rows in a batch of {counts[0][1]} samples ({first}), so "
                    "it can't be cut along dimension 0. Give every value of the batch one row per sample (loaders that "
                    "are combined: one batch size and one number of samples), or set strategy.batch_dims="
                    f"{{{self._declared.key(path)}: none}} to give every device all of it."
                )
        return counts[0][1] if counts else None

    def split(self, batch: Batch, sizes: Sizes) -> list[Chunk]:
        """Cut a batch; the table above tells what becomes of its values.

        Tensors are views of the batch's. An empty chunk has tensors of shape (0, ...).

        Args:
            batch: nested tensors, each of shape (N, ...).
            sizes: samples per chunk; they sum to N.

        Returns:
            One chunk per size, in order, of the batch's own type.

        Raises:
            ConfigError: a value can't be cut, or can be read in two ways; the message names it.
        """
        self._learn(batch)
        if self._assumed:
            self._verify_assumed(batch)
        return cut(batch, list(sizes), self._role, self._root)

    def _learn(self, batch: Batch) -> list[_Reached]:
        """Decide what is new in a batch: first what is certain, then the rest, which may ask for N.

        Returns:
            What is then reached in it.
        """
        reached = list(self._reached(batch))
        if _are_known(reached):
            return reached
        self._settle(batch, None)
        reached = list(self._reached(batch))
        if _are_known(reached):
            return reached
        counts = [count for _, count in self._counts(reached)]
        outside = [count for path, count in row_counts(batch) if not self._lists_around(batch, path)]
        self._asks = self._evidence.asks and bool(counts or outside)
        num = counts[0] if counts else outside[0] if outside else self._usual_count(batch)
        if num is not None:
            self._settle(batch, num)
        return list(self._reached(batch))

    def _reached(self, value: Any, path: Path = ()) -> Iterator[_Reached]:
        """Yield the arrays, lists and objects with `split` of a batch, with their paths and what is known of them.

        What is in a list is yielded once that is known to be a structure.
        """
        if (has_rows := is_array(value)) or is_sequence(value):
            key = (path, has_rows)
            yield path, value, self._roles.get(key)
            role = self._roles.get(key)  # settled meanwhile, perhaps
        else:
            role = None if self._declared.word(path) == "shared" else "structure"
            if role is not None and splits_itself(value):
                yield path, value, "itself"
                return
        for key, child in (children(value) or ()) if role == "structure" else ():
            yield from self._reached(child, (*path, key))

    def _settle(self, batch: Batch, num: int | None) -> None:
        """Note what the values of a batch are: only what is certain, or everything, where N is given."""
        for path, value, known in self._reached(batch):
            role = known or self._certain(value, path)
            if role is None and num is not None:
                role = self._by_convention(value, path, num)
            if role is not None and role != "itself":
                self._roles[path, is_array(value)] = role

    def _certain(self, value: Any, path: Path) -> str | None:
        """What a value is by the user's word or the loader's evidence; None where both are silent."""
        option = self._declared.word(path)
        if option is not None:
            return self._verified(option, value, path)
        if not is_array(value) and (self._evidence.is_structure(path) or self._declared.names_elements(value, path)):
            return "structure"
        if self._evidence.is_stacked(path):
            # `default_collate` makes a list of all samples' strings, and structures of everything else
            strings = not is_array(value) and len(value) and all(isinstance(element, (str, bytes)) for element in value)
            return "rows" if is_array(value) else "list" if strings else "structure"
        shapes = self._evidence.shapes(path)
        if not shapes:
            return None
        if all(shape[0] == num for num, shape in shapes):
            return "rows" if is_array(value) else "list"
        if len({shape[0] for _, shape in shapes}) == 1 and not _follows_samples(shapes):
            return "shared" if is_array(value) else "structure"
        what = " and ".join(f"{'x'.join(map(str, shape))} in a batch of {num}" for num, shape in shapes)
        raise ConfigError(
            f"{called(path, self._root)} is {what}: it has neither one {'row' if is_array(value) else 'element'} per "
            "sample nor always the same, so it can't be cut into chunks along dimension 0. Give it one per sample "
            "(transpose a batch whose samples are another dimension), or put it into an object that defines "
            "split(sizes)."
        )

    def _verified(self, option: str, value: Any, path: Path) -> str:
        if option == "rows":
            return "rows" if is_array(value) else "structure"
        if option in REDUCTIONS or (option == "list" and is_array(value)):
            raise ConfigError(
                f"batch_dims={{{self._declared.key(path)}: {option}}} was given for {called(path, self._root)}, a "
                f"{type(value).__name__}. Give {'0' if is_array(value) else 'list'} or none."
            )
        return option

    def _by_convention(self, value: Any, path: Path, num: int) -> str | None:
        """What a value is where nothing but the batch is known.

        Tensors have one row per sample (one that has not is refused when it is cut). A list as long as the batch whose
        tensors all have as many rows could be either. So could, in a run, any whose elements do not differ in rows,
        unless the samples are counted in lists.
        """
        if is_array(value):
            if self._assumed is not None:
                self._assumed[path] = None
            return "rows"
        inside = [count for _, count in row_counts(value)]
        if len(value) != num or (path == () and inside and is_array(value[0]) and inside[0] != num):
            return "structure"
        if not inside or any(count != num for count in inside):
            if path == () and any(is_array(element) for element in value):
                return "structure"  # of `x, y` one has another number of rows, which is refused
            self._verify_alike(value, path)
            if self._asks and len(set(inside)) < 2:
                raise ConfigError(self._question(value, path, f"{num} {_plural(value[0])}"))
            return "list"
        if len({_kind(element) for element in value}) > 1:
            return "structure"  # samples are all of one kind
        raise ConfigError(self._question(value, path, f"{num} {_plural(value[0])} of {num} rows each"))

    def _question(self, value: Any, path: Path, elements: str) -> str:
        """Ask what the elements of a list as long as the batch are."""
        name, key = called(path, self._root), self._declared.key(path)
        return (
            f"{name} is a {type(value).__name__} of {elements} in a batch of {len(value)} samples: its elements may be "
            f"samples, or a structure. Set strategy.batch_dims={{{key}: list}} for one element per sample, "
            f"{{{key}: 0}} for a structure whose tensors have one row per sample, or {{{key}: none}} where it is the "
            "same for all samples."
        )

    def _verify_alike(self, value: Any, path: Path) -> None:
        """Refuse a list as long as the batch that may be a name and its value, as `("more", {})`."""
        kinds = sorted({_family(element) for element in value if element is not None})
        if len(kinds) > 1:
            kinds_of = f"{len(value)} values of several kinds ({', '.join(kinds)})"
            raise ConfigError(self._question(value, path, kinds_of))

    def _verify_assumed(self, batch: Batch) -> None:
        """Compare the tensors of the first two batches that were taken for rows without evidence.

        Raises:
            ConfigError: one is the same in both while others differ, and has unequal rows; it is hardly samples.
        """
        assert self._assumed is not None
        now = {path: _small(batch, path) for path in self._assumed}
        before, self._assumed = self._assumed, now
        if any(value is None for value in before.values()):
            return  # of the first batch nothing is known yet
        if all(torch.equal(before[path], value) for path, value in now.items() if value is not None):
            return  # the same batch once more, which shows nothing: a loader that has no other
        self._assumed = None
        equal = [path for path, value in now.items() if value is not None and _is_same(value, before[path])]
        for path in equal if len(equal) < len(now) else []:
            if not (now[path] == now[path][:1]).all():
                raise ConfigError(
                    f"{called(path, self._root)} is the same in two batches in a row, so that it may be one row per "
                    "sample, or the same for all samples. Set strategy.batch_dims="
                    f"{{{self._declared.key(path)}: 0}} or {{{self._declared.key(path)}: none}}."
                )

    def _usual_count(self, batch: Batch) -> int | None:
        """N where nothing is certain and no tensor is outside lists: the rows on which all tensors agree."""
        inside = {count for _, count in row_counts(batch)}
        if len(inside) > 1:
            raise ConfigError(
                f"The samples of {self._root}, a {type(batch).__name__}, can't be counted: its tensors are in lists "
                f"and have {', '.join(map(str, sorted(inside)))} rows. Set strategy.batch_dims={{path: list}} for the "
                "lists that have one element per sample (0, 1, ... are the paths of a tuple's values)."
            )
        rows = next(iter(inside), None)
        return plain_length(batch) if rows is None else self._count_in_lists(batch, rows)

    def _count_in_lists(self, batch: Batch, rows: int) -> int:
        """N of a batch whose tensors are all in lists and have as many rows: those, or the length of the lists."""
        lengths = {self._lists_around(batch, path)[-1] for path, _ in row_counts(batch)}
        length, size = lengths.pop(), self._evidence.batch_size()
        if lengths or length == rows or size == rows:
            return rows
        if size is not None and (size == length or rows > size):
            return length
        if size is not None and length > size:
            return rows
        raise ConfigError(
            f"The samples of {self._root}, a {type(batch).__name__}, can't be counted: its tensors are in lists of "
            f"{length} and have {rows} rows. Set strategy.batch_dims={{path: list}} for lists that have one element "
            "per sample, or {path: 0} for lists of tensors with one row per sample (0, 1, ... are the paths of a "
            "tuple's values)."
        )

    def _lists_around(self, batch: Batch, path: Path) -> list[int]:
        """Lengths of the lists and tuples that a value is in, the batch itself and known structures aside."""
        paths = [path[:i] for i in range(1, len(path)) if self._roles.get((path[:i], False)) != "structure"]
        return [len(value) for value in (at(batch, one) for one in paths) if is_sequence(value)]

    def _counts(self, reached: Sequence[_Reached]) -> list[tuple[Path, int]]:
        """Paths and lengths of all values whose length is N, as far as that is decided."""
        counted = ("rows", "list", "itself")
        return [(path, len(value)) for path, value, role in reached if role in counted and hasattr(value, "__len__")]

    def _role(self, value: Any, path: Path) -> Role:
        """The role of a value of a batch that was learned."""
        if (has_rows := is_array(value)) or is_sequence(value):
            return self._roles.get((path, has_rows), "structure")
        return "shared" if self._declared.word(path) == "shared" else "structure"


def _are_known(reached: Sequence[_Reached]) -> bool:
    return all(role is not None for _, _, role in reached)


def _follows_samples(shapes: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
    """Whether a further dimension is as long as the batch, of batches of every size."""
    dims = min(len(shape) for _, shape in shapes)
    return any(all(shape[dim] == num for num, shape in shapes) for dim in range(1, dims))


_SMALL = 65536
"""Numbers of a tensor that is compared with the next batch's; larger ones are not compared."""


def _small(batch: Batch, path: Path) -> Any:
    """A copy of the tensor at a path; an empty one for a large tensor, None where there is none."""
    try:
        value = torch.as_tensor(at(batch, path))
    except (KeyError, TypeError):
        return None
    return value.detach().clone() if value.numel() <= _SMALL else value[:0].detach()


def _is_same(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same fractions; labels may be the same in two batches by chance."""
    if not value.is_floating_point() or not bool((value % 1 != 0).any()):
        return False
    return value.shape == other.shape and torch.equal(value, other)


def _kind(value: Any) -> Any:
    """What the samples of a batch have in common."""
    return (value.dtype, value.ndim, getattr(value, "layout", None)) if is_array(value) else type(value)


def _family(value: Any) -> str:
    """The kind of a value, numbers of all types alike: samples' numbers may be 1 and 0.5."""
    if isinstance(value, (numbers.Number, np.generic)) or (isinstance(value, (Tensor, np.ndarray)) and not value.ndim):
        return "number"
    families = {"mapping": Mapping, "list": (list, tuple), "tensor": (Tensor, np.ndarray)}
    return next((name for name, types in families.items() if isinstance(value, types)), type(value).__name__)


def _plural(value: Any) -> str:
    return "tensors" if is_array(value) else "values"
