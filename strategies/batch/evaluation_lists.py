"""Join what steps append to lists of the module: one element per global batch, in the loader's order.

    def validation_step(self, batch, batch_idx):
        self.outs.append({"preds": preds, "loss": loss})   # in on_validation_epoch_end one for each global batch

In evaluation ranks, and the replicas of a process, each keep a list of their own until the epoch's steps have ended.
Then what the parts of one batch appended becomes one element, as results.py joins it, on the host where there are
ranks. In training that happens after each step, and the lists of ranks stay their own. As many
elements as samples, or unequal numbers of them, stay what they are. Of parts of one sample each, numbers, strings, and
tensors of several rows are samples.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import CellType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.module_checks import recompute_weights
from ..core.module_log import lightning_modules
from ..core.module_state import LIGHTNING_KEYS, MOST_ELEMENTS, copied
from ..core.patching import Replacement, hooks_of
from .losses import is_loss
from .results import Joiner, are_equal, combine, is_whole
from .tree import Path, called, children, rebuild, walk

Key: TypeAlias = tuple[int, int]
"""A global batch: its loader, and its number there."""

Space: TypeAlias = dict[str, Any]
"""The attributes of a module."""

_HOLDERS = (list, dict, tuple)


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
    """Follows the lists of one copy of a module: an attribute, or in dictionaries, tuples or lists that are one.

    Args:
        spaces: the attributes of its modules.

    Attributes:
        added: what was appended since `begin`.
    """

    spaces: Sequence[Space]
    added: Appended = field(default_factory=Appended, init=False)

    def begin(self) -> None:
        """Note how long the lists and dictionaries are."""
        self._parents: dict[Path, int] = {}
        for path, values in list(self._found()):
            if type(values) is list and values and all(type(value) in (list, dict) for value in values):
                self._parents[path] = len(values)  # a list for each loader
        self._ends = {path: (values, len(values)) for path, values in self._found()}
        self.added = {}

    def copied(self, module: nn.Module) -> "PartLists":
        """The lists as they are, for another copy of the module."""
        held, made = _held_by_hooks(module), dict[int, Any]()
        copy = PartLists([_own_lists(space, held, made) for space in self.spaces])
        copy.begin()
        return copy

    def take(self, batch: Key, num: float) -> None:
        """Note what a part of `num` samples has appended; a part without samples leaves nothing."""
        for path, values in self._found():
            if type(values) is not list:
                continue
            before, start = self._ends.get(path, (values, self._parents.get(path, 0)))
            if len(values) < start or (before is not values and not _begins_with(values, before[:start])):
                start = 0  # a new list, or one that was cleared
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
                found[path] = {key: child for key, child in new if not isinstance(child, _HOLDERS)}
        return {path: new for path, new in found.items() if new}

    def update(self, path: Path, entries: dict[Any, Any]) -> None:
        """Add keys to a dictionary, which this part may not have."""
        dict.update(self._at(path, {}), entries)  # a Counter's own adds

    def _at(self, path: Path, otherwise: Any) -> Any:
        value: Any = self.spaces[path[0]]
        for key in path[1:-1]:
            value = value.setdefault(key, {}) if isinstance(value, dict) else value[key]
        return value.setdefault(path[-1], otherwise) if isinstance(value, dict) else value[path[-1]]

    def _found(self) -> Iterator[tuple[Path, Any]]:
        """Yield the lists, and dictionaries, each with its first path."""
        seen = set[int]()
        for number, space in enumerate(self.spaces):
            for name, value in space.items():
                if type(value) is list or (name not in LIGHTNING_KEYS and isinstance(value, (dict, tuple))):
                    for path, one in self._inside((number, name), value):
                        if id(one) not in seen:
                            seen.add(id(one))
                            yield path, one

    def _inside(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        is_parent = type(value) is tuple or self._parents.get(path) == len(value)
        if not is_parent:
            yield path, value
        if is_parent or (isinstance(value, dict) and len(value) <= MOST_ELEMENTS):
            for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if type(child) in (list, tuple) or isinstance(child, dict):
                    yield from self._inside((*path, key), child)


class EvaluationLists:
    """Joins the lists of a run's evaluations.

    Args:
        strategy: name that begins messages.
        options: what `verify_batch_dims` returned: of `<step>.<name of the list>`, `sum` or `mean` of all numbers and
            tensors in it, `list` for all elements, or `none`, where all parts append the same.
        gather: exchanges what ranks have appended; None in one process.
        limit_mb: what that may be, of all ranks.
    """

    def __init__(
        self,
        strategy: str = "dp",
        options: Mapping[str, str] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        limit_mb: float = 0.0,
    ) -> None:
        self._strategy, self.options, self._gather, self._limit_mb = strategy, options or {}, gather, limit_mb
        self._parts: list[PartLists] = []
        """The root's, and those of the replicas that have run."""
        self._batch: Key = (0, 0)
        self._num = 0.0
        self._has_begun = False
        self._hook: Replacement | None = None
        self._counted: dict[str, set[str]] = {}
        """By step, the numbers to which it adds."""
        self._counters: Counters | None = None
        self._are_samples: dict[tuple[str, Path], bool] = {}
        """By step and list, whether elements are samples: parts of a single one don't show it."""

    def learn(self, step: str, counters: set[str]) -> None:
        """Learn to which numbers of the module a step of evaluation adds: those of ranks are added up."""
        self._counted.setdefault(step, set()).update(counters)

    def begin(self, module: pl.LightningModule) -> None:
        """Begin an evaluation: its lists are looked at when its first batch comes, and joined after the last."""
        self._parts = [PartLists([vars(part) for part in lightning_modules(module)])]
        self._has_begun, self._module, self._counters = False, module, None
        if self._hook is not None:  # of an evaluation that has failed
            self._hook.remove()
        loop = module.trainer._evaluation_loop
        self._hook = Replacement(loop, "_on_evaluation_epoch_end", partial(self._end, module.trainer))

    def begin_batch(self, batch: Key | None, num: float) -> None:
        """Learn which batch the next step gets, and how many samples of it this process has."""
        self._take()
        number = self._batch[1] + 1 if self._has_begun else 0
        self._batch, self._num, self._has_begun = batch or (self._batch[0], number), num, True

    def _take(self) -> None:
        """Note what the root's step on the last batch has appended and counted, or what there is before the first."""
        root, module = self._parts[0], self._module
        if self._has_begun:
            root.take(self._batch, self._num)
            if self._counters is not None:
                self._counters.take(self._num > 0)
            return
        root.begin()
        step = "test_step" if module.trainer.testing else "validation_step"
        names = self._counted.get(step, set()) if self._gather is not None else ()
        self._counters = Counters(module, names) if names else None

    @contextmanager
    def of_replicas(
        self, replicas: Sequence[Sequence[nn.Module]], used: Sequence[int], sizes: Sequence[int]
    ) -> Generator[None]:
        """Give each replica that runs a step of evaluation inside the block lists of its own.

        Args:
            replicas: the modules of each that have a `log`, the root's first.
            used: the replicas that have samples.
            sizes: their samples.
        """
        if self._gather is None:
            self.begin_batch(None, sum(sizes))
        while len(self._parts) < len(replicas):
            self._parts.append(self._parts[0].copied(replicas[0][0]))
        with _given(self._parts, replicas, used):
            yield
        for i, size in zip(used, sizes, strict=True):
            self._parts[i].take(self._batch, size)

    def of_batch(self, modules: Sequence[Sequence[nn.Module]], sizes: Sequence[int]) -> "BatchLists":
        """Follow the lists of one training batch, of parts of so many samples."""
        return BatchLists(self, modules, sizes)

    def _end(self, trainer: pl.Trainer, call_hooks: Callable[[], Any]) -> Any:
        """Join the lists, and call the hooks of the epoch's end.

        Raises:
            ConfigError: the lists are too large to be gathered, or parts of a batch can't be joined.
        """
        assert self._hook is not None
        self._hook.remove()
        self._hook, rest = None, 1.0
        if trainer.sanity_checking:
            rest = sum(map(float, trainer.num_val_batches)) / sum(map(float, trainer.num_sanity_val_batches))
        if self._gather is not None and not self._has_begun:  # of a rank without batches
            recompute_weights(trainer.lightning_module)
        self._join_all("test_step" if trainer.testing else "validation_step", rest)
        return call_hooks()

    def _join_all(self, step: str, rest: float) -> None:
        """Join the lists; `rest` is how many times as much the whole evaluation appends, if this is a sanity check."""
        root = self._parts[0]
        self._take()
        if self._counters is not None and self._gather is not None:
            self._counters.put(self._gather(_on_host(self._counters.added())))
        if self._gather is None and len(self._parts) == 1:
            return
        parts = [(part.added, part.entries()) for part in self._parts]
        if self._gather is not None:
            if not self._is_to_gather(self._gather, parts, rest):
                return
            parts = [part for rank in self._gather(_on_host(parts)) for part in rank]
        every = dict.fromkeys(path for added, entries in parts for path in (*added, *entries))
        for path in every:
            with torch.no_grad():
                if joined := self.joined(step, path, [added for added, _ in parts]):
                    root.put(path, joined)
                else:
                    join = self._join(step, path)
                    root.update(path, join.entries([entries[path] for _, entries in parts if path in entries]))

    def joined(self, step: str, path: Path, parts: Sequence[Appended]) -> list[Any]:
        """Join what parts of batches have appended to a list.

        Raises:
            ConfigError: it isn't known how.
        """
        batches: dict[Key, list[Added]] = {}
        for one in (one for added in parts for one in added.get(path, ())):
            batches.setdefault(one.batch, []).append(one)
        join, found = self._join(step, path), [batches[key] for key in sorted(batches)]
        if any(part.num > 1 for of_batch in found for part in of_batch):
            self._are_samples[step, path] = join.are_samples(found)
        return join.elements(found, self._are_samples.get((step, path), True) and join.are_samples(found))

    def _join(self, step: str, path: Path) -> "_Join":
        return _Join(self._strategy, step, path[1:], self.options.get(f"{step}.{path[1]}"))

    def _is_to_gather(self, gather: Callable[[Any], list[Any]], parts: Any, rest: float) -> bool:
        """Whether any rank has something to gather; all together not too much."""
        tensors = [value for _, value in walk(parts) if isinstance(value, (Tensor, np.ndarray))]
        ranks = gather((any(map(any, parts)), sum(value.nbytes for value in tensors)))
        total = sum(size for _, size in ranks) * rest / 2**20
        if total > self._limit_mb:
            raise ConfigError(
                f"{self._strategy}: lists that evaluation steps append to hold {total:,.0f} MiB over all ranks, and "
                f"strategy.gather_lists_mb={self._limit_mb:g} are gathered at most. Use a metric of torchmetrics, or "
                "raise it, if the host's memory holds as much for each rank."
            )
        return any(has for has, _ in ranks)


class Counters:
    """Numbers, or tensors of them, to which steps of an evaluation add, such as `self.correct += ...`.

    Args:
        names: of attributes and buffers.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._module, self._names = module, sorted(names)
        self._first = self._last = self._values()

    def _values(self) -> dict[str, Any]:
        """Copies of what they are; of what is no number any more there is none."""
        found = {name: vars(self._module.get_submodule(path)).get(key) for name, path, key in self._places()}
        return {name: copied(value) if isinstance(value, Tensor) else value for name, value in found.items()}

    def _places(self) -> Iterator[tuple[str, str, str]]:
        for name in self._names:
            path, _, key = name.rpartition(".")
            yield name, path, key

    def take(self, counts: bool) -> None:
        """Undo what a step has added that ran on samples of other ranks."""
        if not counts:
            self._give(self._last)
        self._last = self._values()

    def added(self) -> dict[str, Any]:
        """What was added by this rank."""
        return {name: value - self._first[name] for name, value in self._last.items()}

    def put(self, of_ranks: Sequence[dict[str, Any]]) -> None:
        """Have the module hold what all ranks have added."""
        self._give({name: sum((one[name] for one in of_ranks), start=own) for name, own in self._first.items()})

    def _give(self, values: dict[str, Any]) -> None:
        for name, path, key in self._places():
            vars(self._module.get_submodule(path))[key] = values[name]


class BatchLists:
    """What the parts of a training batch append to lists: what one device would, once they are joined.

    Args:
        lists: says how.
        modules: those of each part that have a `log`, the root's first; micro-batches have the same ones.
        sizes: samples of each part.
    """

    def __init__(self, lists: EvaluationLists, modules: Sequence[Sequence[nn.Module]], sizes: Sequence[int]) -> None:
        self._lists, self._modules, self._sizes = lists, modules, sizes
        root = PartLists([vars(module) for module in modules[0]])
        root.begin()
        is_root = [module[0] is modules[0][0] for module in modules]
        self._parts = [root if own else root.copied(modules[0][0]) for own in is_root]
        self._copies = [i for i, own in enumerate(is_root) if not own and sizes[i]]

    def given(self) -> AbstractContextManager[None]:
        """Give copies of the module their lists, inside the block."""
        return _given(self._parts, self._modules, self._copies)

    def take(self, part: int) -> None:
        """Note what a part has appended, whose step has ended."""
        self._parts[part].take((0, 0), self._sizes[part])

    def join(self, losses: Sequence[Tensor], loss: Tensor | None) -> None:
        """Put what the batch appends in the place of what its parts have, given their losses and the batch's."""
        parts = [part.added for part in dict.fromkeys(self._parts)]
        of_batch = [with_loss(added, losses, loss) for added in parts]
        for path in dict.fromkeys(path for added in parts for path in added):
            try:
                with torch.no_grad():
                    joined = self._lists.joined("training_step", path, of_batch)
            except ConfigError:  # which was told
                joined = [value for added in of_batch for one in added.get(path, ()) for value in one.values]
            self._parts[0].put(path, joined)


def with_loss(appended: Appended, losses: Sequence[Tensor], loss: Tensor | None) -> Appended:
    """What parts have appended, with the batch's loss in the place of theirs."""

    def replaced(value: Any) -> Any:
        if loss is not None and any(is_loss(value, one) for one in losses):
            return loss.detach()
        if loss is not None and type(value) is float and any(str(value) == str(float(one)) for one in losses):
            return float(loss)
        items = children(value) if isinstance(value, (dict, list, tuple)) else None
        return value if items is None else rebuild(value, [replaced(child) for _, child in items])

    return {
        path: [one._replace(values=[replaced(value) for value in one.values]) for one in added]
        for path, added in appended.items()
    }


@contextmanager
def _given(parts: Sequence[PartLists], replicas: Sequence[Sequence[nn.Module]], used: Sequence[int]) -> Generator[None]:
    """Give each replica but the root, that is used inside the block, lists of its own."""
    before = {i: [dict(vars(part)) for part in replicas[i]] for i in used if i}
    pairs = {i: list(zip(parts[i].spaces, replicas[i], strict=True)) for i in before}
    for own, module in (pair for of_replica in pairs.values() for pair in of_replica):
        vars(module).update(own)
    yield
    for i, kept in before.items():
        for (own, module), was in zip(pairs[i], kept, strict=True):
            made = {n: v for n, v in vars(module).items() if n not in was and isinstance(v, (list, dict))}
            own.update({name: vars(module)[name] for name in own if name in vars(module)} | made)
            vars(module).update({name: was[name] for name in own if name in was})


def _held_by_hooks(module: nn.Module) -> set[int]:
    """The ids of what hooks refer to beside the module: a list that they fill stays the one that steps read."""
    hooks = [hook for part in module.modules() for own in hooks_of(part) for hook in own.values()]
    cells = [cell for hook in hooks for cell in getattr(hook, "__closure__", None) or () if cell != CellType()]
    return {id(cell.cell_contents) for cell in cells} | {id(getattr(hook, "__self__", None)) for hook in hooks}


def _own_lists(space: Space, held: set[int], made: dict[int, Any]) -> Space:
    """The lists among attributes, and structures of lists, as a copy's own; `made` has those that were copied."""
    return {
        name: _own(value, made)
        for name, value in space.items()
        if name not in LIGHTNING_KEYS
        and id(value) not in held
        and (type(value) is list or (isinstance(value, (dict, tuple)) and _holds_lists(value)))
    }


def _own(value: Any, made: dict[int, Any]) -> Any:
    if id(value) not in made:
        if type(value) is list:
            made[id(value)] = [_own(child, made) if type(child) is list else child for child in value]
        elif isinstance(value, (dict, tuple)):
            made[id(value)] = rebuild(value, [_own(child, made) for _, child in children(value) or ()])
    return made.get(id(value), value)


def _holds_lists(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return not inside or any(isinstance(child, (list, dict)) for child in inside)


def _begins_with(values: list[Any], others: list[Any]) -> bool:
    return len(values) >= len(others) and all(one is other for one, other in zip(values, others, strict=False))


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        is_view = value.untyped_storage().nbytes() != value.nbytes
        return value.clone() if is_view else value  # not all that it is a view of
    items = children(value) if isinstance(value, (dict, list, tuple)) else None
    return value if items is None else rebuild(value, [_on_host(child) for _, child in items])


@dataclass(frozen=True)
class _Join:
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
    arrays = [part for _, part in walk(value) if isinstance(part, (Tensor, np.ndarray))]
    return bool(arrays) and all(not part.ndim or len(part) <= 1 for part in arrays)
