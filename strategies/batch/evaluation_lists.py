"""Join what evaluation steps append to lists of the module: one element per global batch, in the loader's order.

Ranks, and the replicas of a process, each keep a list of their own until the epoch's steps have ended.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.errors import ConfigError
from ..core.module_checks import recompute_weights
from ..core.module_log import lightning_modules
from ..core.patching import LIGHTNING_KEYS, MOST_ELEMENTS, Replacement
from .results import Joiner
from .structure import Path, called, children, is_array, rebuild, walk

Key: TypeAlias = tuple[int, int]
"""A global batch: its loader, and its number there."""

_FOLLOWED = (list, dict, defaultdict, OrderedDict)


class Added(NamedTuple):
    """What one part of `num` samples, of a global batch, has appended to a list."""

    batch: Key
    num: float
    values: list[Any]


Appended: TypeAlias = dict[Path, list[Added]]
"""What parts have appended, by the path of the list."""


class PartLists:
    """Follows the lists of one copy of a module: attributes of its modules, or in dictionaries or lists that are some.

    `spaces` are the attributes; `added` is what was appended since this was made.
    """

    def __init__(self, spaces: Sequence[dict[str, Any]]) -> None:
        self.spaces, self.added = spaces, Appended()
        self._parents = dict[Path, int]()
        first = list(self._found())
        # a list for each loader
        parents = (one for one in first if one[1] and all(type(value) in _FOLLOWED for value in one[1]))
        self._parents.update((path, len(values)) for path, values in parents)
        self._ends = {path: (values, len(values)) for path, values in (*first, *self._found())}

    def copied(self) -> "PartLists":
        """The lists as they are, for another copy of the module."""
        return PartLists(
            [
                {
                    name: tree_unflatten(*tree_flatten(value))
                    for name, value in space.items()
                    if _holds_lists(name, value)
                }
                for space in self.spaces
            ]
        )

    def take(self, batch: Key, num: float) -> None:
        """Note what a part of `num` samples has appended; a part without samples leaves nothing."""
        for path, values in self._found():
            before, start = self._ends.get(path, (values, 0))
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
        holder: Any = self.spaces[path[0]]
        for key in path[1:-1]:  # which a rank without batches may not have
            holder = holder.setdefault(key, {}) if isinstance(holder, dict) else holder[key]
        values = holder.setdefault(path[-1], []) if isinstance(holder, dict) else holder[path[-1]]
        values[len(values) - sum(len(added.values) for added in self.added.get(path, ())) :] = joined

    def _found(self) -> Iterator[tuple[Path, list[Any]]]:
        """Yield the lists, each with its first path."""
        seen = set[int]()
        left: list[tuple[Path, Any]] = [((i,), space) for i, space in enumerate(self.spaces)]
        while left:
            path, value = left.pop(0)
            if id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) is list and self._parents.get(path) != len(value):
                yield path, value
            elif len(value) <= MOST_ELEMENTS:
                skipped = LIGHTNING_KEYS if len(path) == 1 else ()
                held = (item for item in children(value) or () if type(item[1]) in _FOLLOWED)
                left += [((*path, key), child) for key, child in held if key not in skipped]


def _holds_lists(name: str, value: Any) -> bool:
    if name in LIGHTNING_KEYS or type(value) not in _FOLLOWED:
        return False
    return type(value) is list or not value or any(type(child) in _FOLLOWED for child in value.values())


class EvaluationLists:
    """Joins the lists of a run's evaluations; `options` is what `verify_batch_dims` returned.

    `gather` exchanges what ranks have appended, of all ranks `limit_mb` at most; None in one process.
    """

    def __init__(
        self,
        strategy: str = "dp",
        options: Mapping[str, str] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        limit_mb: float = 0.0,
    ) -> None:
        self._strategy, self.options, self._limit_mb = strategy, options or {}, limit_mb
        self._gather = self._gather_ranks = gather
        self._spaces: list[dict[str, Any]] = []
        self._parts: list[PartLists] = []  # from the first batch on: the root's, and those of replicas that have run
        self._batch: Key = (0, 0)
        self._num = 0.0
        self._hook: Replacement | None = None
        # by step and list, whether elements are samples: parts of a single one don't show it
        self._are_samples: dict[tuple[str, Path], bool] = {}

    def begin(self, module: pl.LightningModule) -> None:
        """Begin an evaluation: its lists are looked at when its first batch comes, and joined after the last."""
        self._spaces, self._parts = [vars(part) for part in lightning_modules(module)], []
        self._gather = self._gather_ranks
        if self._hook is not None:  # of an evaluation that has failed
            self._hook.remove()
        loop = module.trainer._evaluation_loop
        self._hook = Replacement(loop, "_on_evaluation_epoch_end", partial(self._end, module.trainer))

    def stay(self) -> None:
        """Leave the lists of this evaluation as they are: each rank evaluates all batches."""
        self._gather = None

    def begin_batch(self, batch: Key | None, num: float) -> None:
        """Learn which batch the next step gets, and how many samples of it this process has."""
        number = self._batch[1] + 1 if self._parts else 0
        self._take()
        self._batch, self._num = batch or (self._batch[0], number), num

    def _take(self) -> None:
        """Note what the root's step on the last batch has appended, or what there is before the first."""
        if self._parts:
            self._parts[0].take(self._batch, self._num)
        else:
            self._parts = [PartLists(self._spaces)]

    @contextmanager
    def of_replicas(
        self, replicas: Sequence[Sequence[nn.Module]], used: Sequence[int], sizes: Sequence[int]
    ) -> Generator[None]:
        """Give each replica that is used, with so many samples, lists of its own inside the block."""
        if self._gather is None:
            self.begin_batch(None, sum(sizes))
        while len(self._parts) < len(replicas):
            self._parts.append(self._parts[0].copied())
        pairs = [
            (own, vars(module))
            for i in used
            if i
            for own, module in zip(self._parts[i].spaces, replicas[i], strict=True)
        ]
        before = [dict(space) for _, space in pairs]
        for own, space in pairs:
            space.update(own)
        yield
        for (own, space), was in zip(pairs, before, strict=True):
            own.update({n: v for n, v in space.items() if n in own or (n not in was and type(v) in _FOLLOWED)})
            space.update({n: was[n] for n in own if n in was})
        for i, size in zip(used, sizes, strict=True):
            self._parts[i].take(self._batch, size)

    def _end(self, trainer: pl.Trainer, call_hooks: Callable[[], Any]) -> Any:
        """Join the lists, and call the hooks of the epoch's end."""
        assert self._hook is not None
        self._hook.remove()
        self._hook = None
        if self._gather is not None and not self._parts:  # of a rank without batches
            recompute_weights(trainer.lightning_module)
        self._take()
        parts = [part.added for part in self._parts]
        if self._gather is not None:
            share = 1.0
            if trainer.sanity_checking:  # of what the whole evaluation appends
                whole = sum(map(float, trainer.num_val_batches))  # infinite, if a stream does not tell
                share = sum(map(float, trainer.num_sanity_val_batches)) / whole or 1.0
            parts = self._gathered(self._gather, parts, share)
        step = "test_step" if trainer.testing else "validation_step"
        for path in dict.fromkeys(path for added in parts for path in added) if len(parts) > 1 else ():
            with torch.no_grad():
                self._parts[0].put(path, self.joined(step, path, parts))
        return call_hooks()

    def _gathered(self, gather: Callable[[Any], list[Any]], parts: list[Any], share: float) -> list[Any]:
        """What all ranks have, if any has something, and all together not too much."""
        size = sum(value.nbytes for _, value in walk(parts) if isinstance(value, (Tensor, np.ndarray)))
        ranks = gather((any(parts), size))
        if (total := sum(size for _, size in ranks) / share / 2**20) > self._limit_mb:
            raise ConfigError(
                f"{self._strategy}: lists that evaluation steps append to hold {total:,.0f} MiB over all ranks, and "
                f"strategy.gather_lists_mb={self._limit_mb:g} are gathered at most. Use a metric of torchmetrics, or "
                "raise it, if the host's memory holds as much for each rank."
            )
        return [part for rank in gather(_on_host(parts)) for part in rank] if any(has for has, _ in ranks) else []

    def joined(self, step: str, path: Path, parts: Sequence[Appended]) -> list[Any]:
        """The elements of the whole batches, in order, of what parts of them have appended to a list."""
        every = sorted((one for added in parts for one in added.get(path, ())), key=lambda one: one.batch)
        are_samples = all(len(part.values) == part.num for part in every)
        if any(part.num > 1 for part in every):
            self._are_samples[step, path] = are_samples
        elif are_samples:
            are_samples = self._are_samples.get((step, path), not all(_is_of_batch(part.values[0]) for part in every))
        batches = dict[Key, list[Added]]()
        for one in every:
            batches.setdefault(one.batch, []).append(one)
        word = self.options.get(f"{step}.{path[1]}")
        found, columns = list[Any](), dict[Any, list[tuple[int, list[Any], list[float]]]]()
        for of_batch in batches.values():
            values = [part.values for part in of_batch]
            if len(of_batch) == 1 or are_samples or word == "list" or len({*map(len, values)}) > 1:
                found += [value for own in values for value in own]
                continue
            for place, column in enumerate(zip(*values, strict=True)):  # of a place all batches show what it is
                one = len(found), list(column), [part.num for part in of_batch]
                columns.setdefault((place, type(column[0])), []).append(one)
                found.append(None)
        joiner = Joiner(lambda _: word, partial(self._unknown, step, path), appended=True)
        for of_place in columns.values():
            joined = joiner.join([(values, nums) for _, values, nums in of_place])
            for (i, _, _), value in zip(of_place, joined, strict=True):
                found[i] = value
        return found

    def _unknown(self, step: str, of_list: Path, path: Path, why: str) -> Any:
        raise ConfigError(
            f"{self._strategy}: {step} appends to {'.'.join(map(str, of_list[1:]))} values of which "
            f"{called(path, '') or 'one'} {why}, so that it isn't known what it is of the whole batch. Use self.log or "
            f"a torchmetrics metric, or set strategy.batch_dims={{{step}.{of_list[1]}: sum}}, mean, list (all "
            "elements) or none (the same in all parts)."
        )


def _is_of_batch(value: Any) -> bool:
    """Whether what a part of one sample appended is of a batch, by its tensors, rather than a sample itself."""
    arrays = [part for _, part in walk(value) if isinstance(part, Tensor) or is_array(part)]
    return bool(arrays) and all(not is_array(part) or len(part) <= 1 for part in arrays)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        is_view = value.untyped_storage().nbytes() != value.nbytes
        return value.clone() if is_view else value  # not all that it is a view of
    items = children(value) if isinstance(value, (dict, list, tuple)) else None
    return value if items is None else rebuild(value, [_on_host(child) for _, child in items])
