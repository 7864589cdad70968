"""What the parts of batches append to lists of the module, and how that becomes what whole batches do."""

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.patching import LIGHTNING_KEYS, MOST_ELEMENTS
from .results import Joiner, are_equal, combine, is_array, is_loss, is_whole
from .structure import Path, called, children, rebuild, walk

Key: TypeAlias = tuple[int, int]
"""A global batch: its loader, and its number there."""

Space: TypeAlias = dict[str, Any]
"""The attributes of a module."""


class Added(NamedTuple):
    """What one part of a batch has appended to a list.

    Args:
        batch: the global batch.
        num: samples of the part.
        values: what it appended.
    """

    batch: Key
    num: float
    values: list[Any]


Appended: TypeAlias = dict[Path, list[Added]]
"""What parts have appended, by the path of the list."""


@dataclass(eq=False)
class PartLists:
    """Follows the lists of one copy of a module: an attribute, or in dictionaries or lists that are one.

    Args:
        spaces: the attributes of its modules.
        names: those that are followed, each with its module's number; None for all.

    Attributes:
        added: what was appended since `begin`.
    """

    spaces: Sequence[Space]
    names: Collection[Path] | None = None
    added: Appended = field(default_factory=Appended, init=False)

    def begin(self) -> None:
        """Note how long the lists and dictionaries are."""
        self._parents: dict[Path, int] = {}
        for path, values in list(self._found()):
            if type(values) is list and values and all(type(value) in (list, dict) for value in values):
                self._parents[path] = len(values)  # a list for each loader
        self._ends = {path: (values, len(values)) for path, values in self._found()}
        self.added = {}

    def copied(self) -> "PartLists":
        """The lists as they are, for another copy of the module."""
        spaces = [
            {name: _copied(value) for name, value in self._followed(i, space) if _holds_lists(value)}
            for i, space in enumerate(self.spaces)
        ]
        own = PartLists(spaces, self.names)
        own.begin()
        return own

    def take(self, batch: Key, num: float) -> None:
        """Note what a part of `num` samples has appended; a part without samples leaves nothing."""
        for path, values in self._found():
            if type(values) is not list:
                continue
            before, start = self._ends.get(path, (values, self._parents.get(path, 0)))
            is_new = before is not values and any(one is not other for one, other in zip(values, before, strict=False))
            if len(values) < start or is_new:  # or one that was cleared
                start = 0
                self.added.pop(path, None)
            if not num:
                del values[start:]
            elif len(values) > start:
                self.added.setdefault(path, []).append(Added(batch, num, values[start:]))
            self._ends[path] = values, len(values)

    def put(self, path: Path, joined: list[Any]) -> None:
        """Put the elements of batches in the place of those of parts."""
        values, own = self._at(path, []), sum(len(added.values) for added in self.added.get(path, ()))
        values[len(values) - own :] = joined

    def entries(self) -> dict[Path, dict[Any, Any]]:
        """Further keys of dictionaries since `begin`, of other values than lists (`self.results[name] = score`)."""
        found: dict[Path, dict[Any, Any]] = {}
        for path, value in self._found():
            if isinstance(value, dict):
                before, num = self._ends.get(path, (value, 0))
                new = islice(value.items(), num if before is value and num <= len(value) else 0, None)
                found[path] = {key: child for key, child in new if not isinstance(child, (list, dict))}
        return {path: new for path, new in found.items() if new}

    def update(self, path: Path, entries: dict[Any, Any]) -> None:
        """Add keys to a dictionary, which this part may not have."""
        dict.update(self._at(path, {}), entries)  # a Counter's own adds

    def _at(self, path: Path, otherwise: Any) -> Any:
        value: Any = self.spaces[path[0]]
        for key in path[1:-1]:
            value = value.setdefault(key, {}) if isinstance(value, dict) else value[key]
        return value.setdefault(path[-1], otherwise) if isinstance(value, dict) else value[path[-1]]

    def _followed(self, i: int, space: Space) -> Iterator[tuple[str, Any]]:
        """The attributes of a module that may hold lists."""
        for name, value in space.items():
            is_holder = type(value) is list or (name not in LIGHTNING_KEYS and isinstance(value, dict))
            if is_holder and (self.names is None or (i, name) in self.names):
                yield name, value

    def _found(self) -> Iterator[tuple[Path, Any]]:
        """Yield the lists, and dictionaries, each with its first path."""
        seen = set[int]()
        for i, space in enumerate(self.spaces):
            for name, value in self._followed(i, space):
                for path, one in self._inside((i, name), value):
                    if id(one) not in seen:
                        seen.add(id(one))
                        yield path, one

    def _inside(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        is_parent = self._parents.get(path) == len(value)
        if not is_parent:
            yield path, value
        if is_parent or (isinstance(value, dict) and len(value) <= MOST_ELEMENTS):
            for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if type(child) is list or isinstance(child, dict):
                    yield from self._inside((*path, key), child)


def _holds_lists(value: Any) -> bool:
    return type(value) is list or not value or any(isinstance(child, (list, dict)) for child in value.values())


def _copied(value: Any) -> Any:
    """A list, or a structure of lists and dictionaries, of one's own."""
    if type(value) is list:
        return [_copied(child) if type(child) in (list, dict) else child for child in value]
    own = copy(value)
    own.update({key: _copied(child) for key, child in value.items() if type(child) is list or isinstance(child, dict)})
    return own


@contextmanager
def given_lists(
    parts: Sequence[PartLists], replicas: Sequence[Sequence[nn.Module]], used: Sequence[int]
) -> Generator[None]:
    """Give each replica but the root, that is used inside the block, lists of its own."""
    pairs = [(own, vars(module)) for i in used if i for own, module in zip(parts[i].spaces, replicas[i], strict=True)]
    before = [dict(space) for _, space in pairs]
    for own, space in pairs:
        space.update(own)
    yield
    for (own, space), was in zip(pairs, before, strict=True):
        made = {n: v for n, v in space.items() if n not in was and isinstance(v, (list, dict))}
        own.update({name: space[name] for name in own if name in space} | made)
        space.update({name: was[name] for name in own if name in was})


@dataclass(frozen=True)
class Join:
    """Joins what the parts of all batches of an epoch have appended to one list."""

    strategy: str
    step: str
    path: Path
    word: str | None

    def entries(self, parts: list[dict[Any, Any]]) -> dict[Any, Any]:
        """The keys that all parts have added to a dictionary; counts of one key add up."""
        found: dict[Any, list[Any]] = {}
        for key, value in (item for entries in parts for item in entries.items()):
            found.setdefault(key, []).append(value)
        for key, values in found.items():
            if len(values) > 1 and is_whole(values[0]):
                found[key] = [combine(values, [], "sum")]
            elif not (len(values) == 1 or are_equal(values)):
                self._unknown((key,), "differs between parts of batches")
        return {key: first for key, (first, *_) in found.items()}

    def are_samples(self, batches: list[list[Added]]) -> bool:
        """Whether the elements are samples, as far as these batches show."""
        every = [part for parts in batches for part in parts]
        return all(len(part.values) == part.num for part in every) and (
            any(part.num > 1 for part in every) or not all(_is_of_batch(part.values[0]) for part in every)
        )

    def elements(self, batches: list[list[Added]], are_samples: bool) -> list[Any]:
        """The elements of the whole batches, in order."""
        found: list[list[Any]] = []
        groups: dict[Any, list[tuple[int, int]]] = {}
        for i, parts in enumerate(batches):
            counts = {len(part.values) for part in parts}
            found.append([value for part in parts for value in part.values])
            if len(parts) > 1 and len(counts) == 1 and not are_samples and self.word != "list":
                found[i] = found[i][: counts.pop()]
                for place, value in enumerate(found[i]):
                    groups.setdefault((place, type(value)), []).append((i, place))
        for group in groups.values():
            columns = [([p.values[place] for p in batches[i]], [p.num for p in batches[i]]) for i, place in group]
            joiner = Joiner(lambda _: self.word, self._unknown, appended=True)
            for (i, place), joined in zip(group, joiner.join(columns), strict=True):
                found[i][place] = joined
        return [value for values in found for value in values]

    def _unknown(self, path: Path, why: str) -> Any:
        shown = ".".join(map(str, self.path))
        raise ConfigError(
            f"{self.strategy}: {self.step} appends to {shown} values of which {called(path, '') or 'one'} {why}, so "
            "that it isn't known what it is of the whole batch. Use self.log or a torchmetrics metric, or set strategy."
            f"batch_dims={{{self.step}.{self.path[0]}: sum}}, mean, list (all elements) or none (the same in all "
            "parts)."
        )


def _is_of_batch(value: Any) -> bool:
    """Whether what a part of one sample appended is of a batch, by its tensors, rather than a sample itself."""
    arrays = [part for _, part in walk(value) if isinstance(part, Tensor) or is_array(part)]
    return bool(arrays) and all(not is_array(part) or len(part) <= 1 for part in arrays)


def with_loss(appended: Appended, losses: Sequence[Tensor], loss: Tensor | None) -> Appended:
    """What parts have appended, with the batch's loss in the place of theirs."""
    if loss is None:
        return appended
    return {
        path: [one._replace(values=[_with_loss(value, losses, loss) for value in one.values]) for one in added]
        for path, added in appended.items()
    }


def _with_loss(value: Any, losses: Sequence[Tensor], loss: Tensor) -> Any:
    if any(is_loss(value, one) for one in losses):
        return loss.detach()
    # elsewhere to ask would wait
    if type(value) is float and any(one.is_cpu and str(value) == str(float(one.detach())) for one in losses):
        return float(loss.detach())
    items = children(value) if isinstance(value, (dict, list, tuple)) else None
    return value if items is None else rebuild(value, [_with_loss(child, losses, loss) for _, child in items])
