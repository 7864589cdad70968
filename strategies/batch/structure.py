"""Decide, once per run and value, which dimension of a batch's values is samples: a convention, and the user's word.

a value of a batch of N samples       is
tensor or array of N rows             cut by rows
list or tuple of N elements           cut between its elements
object with `split(sizes)`            cut by itself; so are torch_geometric's batches, by `to_data_list`
mapping, namedtuple, dataclass        a structure; so are other lists, and the batch itself
anything else                         shared: all chunks have it

Where a dataset gives samples by index, a batch of 7 decides (`settle`), else the first one. There N is the number of
rows that most tensors outside of lists have, or the loader's `batch_size` if any has as many; of tensors that are all
in lists the rows, if they have as many (as `batch_size`), else the length of the lists. Where `batch_size` does not
show which, the batches of a loader are not cut: steps get whole ones.

The option `batch_dims` says otherwise. What was decided for a path (`boxes`, `views.0`) holds for the whole run; a
shared tensor whose number of rows then becomes another is not cut, but refused by name.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..core.errors import ConfigError, PartsDiffer
from ..core.types import Batch, Chunk, Sizes
from .batch_dims import REDUCTIONS, DeclaredDims
from .tree import (
    Path,
    Role,
    called,
    children,
    cut,
    is_array,
    is_sequence,
    length,
    plain_length,
    row_counts,
    splits_itself,
)


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
        loaders: that the batches are from, as far as they are known.
        structures: paths of what is a structure in any case: what holds the arguments of a call, say.
        root: what errors call the whole.
        prefix: what the paths of options begin with, which have no prefix for batches.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        loaders: Sequence[Any] = (),
        structures: Sequence[Path] = (),
        root: str = "batch",
        prefix: Path = (),
    ) -> None:
        self._declared = DeclaredDims(options or {}, prefix)
        sizes = {getattr(loader, "batch_size", None) for loader in loaders}
        self._size = size if len(sizes) == 1 and isinstance(size := sizes.pop(), int) else None
        self._structures = {*structures, *([()] if len(loaders) > 1 else [])}
        self._root = root
        self._roles: dict[tuple[Path, bool], Role] = {}
        self._shared: dict[Path, int] = {}
        """Rows of tensors that are the same for all samples, as nobody has said otherwise."""
        self.vague: PartsDiffer | None = None
        """Why these batches are not cut: what their samples are can be read in two ways."""
        self._of_loader = bool(loaders)

    @property
    def with_rows(self) -> list[Path]:
        """Tensors that have one row per sample."""
        return [path for (path, has_rows), role in self._roles.items() if has_rows and role == "rows"]

    @property
    def unclear(self) -> PartsDiffer | None:
        """Why parts of these batches may not be what a step takes them for: a tensor whose rows are something else."""
        for path, rows in self._shared.items():
            return self._refuse(path, f"has {rows} rows, which are not the samples")
        return self.vague

    def settle(self, batch: Batch, num: int) -> None:
        """Decide all by a batch of a known number of samples, if it has values of that length."""
        self._decide(batch, (), num)
        if not {"rows", "list"}.intersection(self._roles.values()):  # nodes of graphs, say
            self._roles.clear()
            self._shared.clear()

    def num_samples(self, batch: Batch) -> int | None:
        """Decide what is new in a batch, and count its samples; None where it holds nothing to count."""
        found = [(length(part), role) for _, part, role in self._reached(batch, ())]
        counts = [num for num, role in found if role in ("rows", "list", "itself") and num is not None]
        if all(role for _, role in found):
            return min(counts, default=None)
        num = counts[0] if counts else self._first_count(batch, ())
        self._decide(batch, (), num)
        return num

    def split(self, batch: Batch, sizes: Sizes) -> list[Chunk]:
        """Cut a batch; the table above tells what becomes of its values.

        Tensors are views of the batch's. An empty chunk has tensors of shape (0, ...).

        Args:
            batch: nested tensors, each of shape (N, ...).
            sizes: samples per chunk; they sum to N.

        Returns:
            One chunk per size, in order, of the batch's own type.

        Raises:
            PartsDiffer: a value can't be cut; the message names it.
        """
        if not self._roles:
            self.num_samples(batch)
        if self.vague is not None:
            raise self.vague
        return cut(batch, list(sizes), self._role, self._refuse)

    def _refuse(self, path: Path, what: str) -> PartsDiffer:
        return PartsDiffer(
            f"{called(path, self._root)} {what}. Give every value of the batch one row per sample; set "
            f"strategy.batch_dims={{{self._declared.key(path)}: none}} to give every device all of it; or put it into "
            "an object that defines split(sizes)."
        )

    def _reached(self, value: Any, path: Path) -> Iterator[_Reached]:
        """Yield the arrays, lists and objects with `split` of a batch, with their paths and what is known of them.

        What is in a list is yielded once that is known to be a structure.
        """
        if (has_rows := is_array(value)) or is_sequence(value):
            role = self._roles.get((path, has_rows))
            yield path, value, role
            role = self._roles.get((path, has_rows))  # decided meanwhile, perhaps
        else:
            role = None if self._declared.word(path) == "shared" else "structure"
            if role is not None and splits_itself(value):
                yield path, value, "itself"
                return
        for key, child in (children(value) or ()) if role == "structure" else ():
            yield from self._reached(child, (*path, key))

    def _decide(self, value: Any, path: Path, num: int | None) -> None:
        for place, part, role in self._reached(value, path):
            if role is None:
                self._roles[place, is_array(part)] = self._decided(part, place, num, is_batch=place == path)

    def _decided(self, value: Any, path: Path, num: int | None, is_batch: bool) -> Role:
        option = self._declared.word(path)
        if option is not None:
            return self._verified(option, value, path)
        if is_array(value):
            if len(value) == num:
                return "rows"
            self._shared[path] = len(value)
            return "shared"
        if path in self._structures or len(value) != num or self._declared.names_elements(value, path):
            return "structure"
        of_all = [num in _lengths(element) for element in value]
        one_kind = len({(type(element), getattr(element, "dtype", None)) for element in value}) == 1
        return "structure" if (any(of_all) if is_batch else all(of_all) and not one_kind) else "list"

    def _verified(self, option: str, value: Any, path: Path) -> Any:
        if option == "rows":
            return "rows" if is_array(value) else "structure"
        if option in REDUCTIONS or (option == "list" and is_array(value)):
            raise ConfigError(
                f"batch_dims={{{self._declared.key(path)}: {option}}} was given for {called(path, self._root)}, a "
                f"{type(value).__name__}. Give {'0' if is_array(value) else 'list'} or none."
            )
        return option

    def _first_count(self, batch: Any, path: Path) -> int | None:
        """N of the first batch, of which nothing is known."""
        values = list(self._values(batch, path))
        words = [(part, self._declared.word(place)) for place, part, _ in values]
        if declared := [len(part) for part, word in words if word == ("rows" if is_array(part) else "list")]:
            return declared[0]
        counts = Counter(length(part) for _, part, inside in values if not (inside or is_sequence(part)))
        if self._size in counts or (type(batch) is list and len(batch) == self._size):
            return self._size
        if counts:
            return counts.most_common(1)[0][0]
        rows = {length(part) for _, part, _ in values if not is_sequence(part)}
        lists = [(len(part), place) for place, part, _ in values if is_sequence(part)]
        below = dict(lists[is_sequence(batch) :] or lists)
        of_lists = self._size if self._size in below else next(iter(below), None)
        if len(rows) != 1 or of_lists is None:
            return of_lists
        fit = [num for num in (*rows, of_lists) if num is not None and num <= (self._size or num)]
        found = [num for num in fit if num == self._size] or fit or [of_lists]
        if len(found) > 1 and self._of_loader:
            self.vague = self._refuse(below[of_lists], "may be a list of samples, or hold tensors with rows of samples")
        return found[0]

    def _values(
        self, value: Any, path: Path, inside: bool = False, below: bool = False
    ) -> Iterator[tuple[Path, Any, bool]]:
        """Yield the arrays, lists and objects with `split` of a batch, and whether they are in a list in it."""
        word = self._declared.word(path)
        if word == "shared":
            return
        is_list = is_sequence(value)
        if is_list or is_array(value) or splits_itself(value):
            yield path, value, inside
        if is_array(value) or splits_itself(value) or (is_list and word == "list"):
            return
        inside = inside or (is_list and below and path not in self._structures and word != "rows")
        for key, child in children(value) or ():
            yield from self._values(child, (*path, key), inside, below=True)

    def _role(self, value: Any, path: Path) -> Role:
        """The role of a value of a batch that was learned."""
        if (has_rows := is_array(value)) or is_sequence(value):
            if has_rows and (before := self._shared.get(path, len(value))) != len(value):
                raise self._refuse(path, f"has {len(value)} rows, and had {before} in the first batch")
            return self._roles.get((path, has_rows), "structure")
        return "shared" if self._declared.word(path) == "shared" else "structure"


def _lengths(value: Any) -> Iterator[int | None]:
    """The lengths of what is in a value, if none of it is in a list."""
    if is_array(value) or is_sequence(value) or splits_itself(value):
        yield length(value)
    else:
        for _, child in children(value) or ():
            yield from _lengths(child)
