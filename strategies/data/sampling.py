"""Divide a loader's batches among ranks; no sample is dropped or read twice.

The loader keeps its own batch sampler (or sampler), and every rank iterates it in the same order:

    21 samples, batches of 8, 2 ranks        step 0        step 1
    one rank's batch (`Deal`)       rank 0   0..7          16..18
                                    rank 1   8..15         19..20
    the global batch (`Divide`)     rank 0   0..3          8..11      16..18
                                    rank 1   4..7          12..15     19..20
"""

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from ..batch.policies import Even, Policy, without_single_samples
from ..core.rng import isolated, random_state
from ..core.types import Unit

Agree: TypeAlias = Callable[[Any], Any]
"""Returns rank 0's value on every rank; all ranks must call it at the same place."""

# Samplers that draw all their randomness when the first index is asked for, from torch's global generator or their own.
_DRAWS_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Share:
    """This rank's part of one global batch, of the samples of all ranks; `step` is None for streams of its own."""

    num: float
    total: float
    some_empty: bool = field(default=False, compare=False)
    step: int | None = field(default=None, compare=False)


@dataclass(eq=False)
class Pass:
    """The shares of a pass that nobody has taken yet, and the places of its batches among all ranks' parts."""

    shares: deque[Share] = field(default_factory=deque[Share])
    positions: list[int] = field(default_factory=list[int])

    def takes(self, step: int, sizes: Sequence[int], rank: int, joins: bool) -> bool:
        """Note a rank's part of a global batch; False if it has none, and does not join the others' step."""
        if sizes[rank] or joins:
            self.shares.append(Share(sizes[rank], sum(sizes), 0 in sizes, step))
        if sizes[rank]:
            self.positions.append(step * len(sizes) + rank)
        return bool(sizes[rank] or joins)


class Passes:
    """Tells the pass that a loop reads from others over the same batches, such as a callback's that looks at one."""

    def __init__(self) -> None:
        self.latest = self.current = Pass()
        self._reader: object = None

    def begin(self) -> Pass:
        """Begin a pass."""
        self.latest = Pass()
        if self._reader is None:
            self.current = self.latest
        return self.latest

    def read_by(self, reader: object) -> Pass:
        """The pass that a loop reads by an iterator: the one that had begun last when it took its first batch."""
        if reader is not self._reader or not self.current.shares:
            self._reader, self.current = reader, self.latest
        return self.current


@dataclass(frozen=True)
class Deal:
    """Treats a unit as one rank's batch; the only rank that reads takes those of all that are `joined`.

    With `spread` the largest units of an incomplete last group are split, not below `smallest`.
    """

    spread: bool
    smallest: int = 1
    joined: int = 1

    def parts(self, units: Iterator[Unit], num_ranks: int) -> Iterator[list[Unit]]:
        """Yield, for each global batch, one part per rank (an empty list for a rank without samples)."""
        while group := list(islice(units, num_ranks * self.joined)):
            if self.joined > 1:
                group = [[index for unit in group for index in unit]]
            while self.spread and len(group) < num_ranks:
                unit = max(group, key=num_samples)
                if num_samples(unit) < 2 * self.smallest:
                    break
                at, half = group.index(unit), (len(unit) + 1) // 2
                group[at : at + 1] = [unit[:half], unit[half:]]
            yield group + [[]] * (num_ranks - len(group))

    def count(self, num_units: int, num_ranks: int) -> int:
        """Number of global batches in `num_units` units."""
        return -(-num_units // (num_ranks * self.joined))


@dataclass
class Divide:
    """Treats a unit as the global batch, of which a policy gives each rank no samples, or `smallest` at least."""

    policy: Policy = field(default_factory=Even)
    changes: list[tuple[int, Policy]] = field(default_factory=list)
    smallest: int = 1
    num_cut: int = 0

    def change(self, policy: Policy, at: int) -> None:
        """Use another policy from a global batch on that no rank has cut yet."""
        assert at >= self.num_cut, f"global batch {at} is already cut ({self.num_cut} are)"
        self.changes.append((at, policy))

    def sizes(self, num_samples: int, num_ranks: int) -> list[int]:
        """Compute the samples per rank of the next global batch."""
        while self.changes and self.changes[0][0] <= self.num_cut:
            self.policy = self.changes.pop(0)[1]
        self.num_cut += 1
        sizes = self.policy.sizes(num_samples, num_ranks)
        return without_single_samples(sizes) if self.smallest > 1 else sizes

    def parts(self, units: Iterator[Unit], num_ranks: int) -> Iterator[list[Unit]]:
        """See `Deal.parts`."""
        for unit in units:
            ends = list(accumulate(self.sizes(len(unit), num_ranks)))
            yield [unit[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def count(self, num_units: int, num_ranks: int) -> int:
        """See `Deal.count`."""
        return num_units


def num_samples(unit: Unit) -> int:
    """Return the number of samples in a unit; a key that is not a list counts as one."""
    return len(unit) if isinstance(unit, (list, tuple)) else 1


@dataclass(eq=False)
class RankBatches(Sampler[Any]):
    """Replaces a loader's batch sampler (or sampler): yields a rank's parts of its `units`, or what it `joins` with."""

    units: Iterable[Unit]
    cut: Deal | Divide
    rank: int
    num_ranks: int
    joins: bool
    agree: Agree
    is_whole: Callable[[], bool | None] | None = None
    passes: Passes = field(default_factory=Passes, init=False)

    @override
    def __iter__(self) -> Iterator[Unit]:
        return (unit for _, unit in self.placed())

    def placed(self) -> Iterator[tuple[int, Unit]]:
        """Yield this rank's parts, each with the place of its first sample in the order of all samples."""
        rank, start, now = self.rank, 0, self.passes.begin()
        units, is_whole = in_one_order(self.units, rank, self.agree), self.is_whole and self.is_whole()
        for step, parts in enumerate(self.cut.parts(units, self.num_ranks)):
            if is_whole or (is_whole is not None and not all(parts)):
                parts = [[index for part in parts for index in part], *[[]] * (self.num_ranks - 1)]
            sizes = list(map(num_samples, parts))
            first, start = start + sum(sizes[:rank]), start + sum(sizes)
            if now.takes(step, sizes, rank, self.joins):
                yield first, parts[rank] if sizes[rank] else _stand_in(parts, bool(is_whole))

    def __len__(self) -> int:
        """Number of steps, the same on every rank."""
        return self.cut.count(len(self.units), self.num_ranks)  # pyright: ignore[reportArgumentType]  # TypeError if it has none

    def part_sizes(self) -> list[list[int]] | None:
        """Samples of every rank in each step; None if they are not known before the loader is read."""
        sampler: Any = self.units
        if type(sampler) is not BatchSampler:
            return None
        try:
            num, size = len(sampler.sampler), int(sampler.batch_size)  # pyright: ignore[reportArgumentType]  # as above
        except TypeError:
            return None
        full, rest = divmod(num, size)
        sizes = [size] * full + ([rest] if rest and not sampler.drop_last else [])
        parts = copy.copy(self.cut).parts(([0] * size for size in sizes), self.num_ranks)
        return [[len(part) for part in step] for step in parts]

    @property
    def deals_others(self) -> bool:
        """Whether ranks each take whole batches of a sampler that is not torch's."""
        return isinstance(self.cut, Deal) and type(self.units) is not BatchSampler

    @property
    def sampler(self) -> Any:
        """The batch sampler's own sampler, on which Lightning calls `set_epoch`, as on one device."""
        return self.units.sampler  # pyright: ignore[reportAttributeAccessIssue]  # AttributeError where it has none

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the wrapped sampler, if it takes one; Lightning never tells batch samplers."""
        if callable(set_epoch := getattr(self.units, "set_epoch", None)):
            set_epoch(epoch)


def _stand_in(parts: list[Unit], is_whole: bool) -> Unit:
    """Take samples of others for a zero-weight batch: two, since BatchNorm can't train on one; all of whole batches."""
    taken = [part for part in parts if num_samples(part)]
    if not isinstance(taken[0], (list, tuple)):
        return taken[0]
    indices = [index for part in taken for index in part]
    return indices if is_whole else indices[:2]


def in_one_order(units: Iterable[Unit], rank: int, agree: Agree) -> Iterator[Unit]:
    """Iterate a sampler in the order of rank 0, which draws as one process would; others keep their random state."""
    sampler: Any = getattr(units, "sampler", units) if type(units) is BatchSampler else units
    if type(sampler) is SequentialSampler:
        return iter(units)
    generator = getattr(sampler, "generator", None)
    own = generator.get_state() if isinstance(generator, torch.Generator) else None
    state, generator_state = agree((random_state(), own))
    if generator_state is not None:
        sampler.generator.set_state(generator_state)
    return _drawn(units, type(sampler) in _DRAWS_AT_ONCE, None if rank == 0 else state)


def _drawn(units: Iterable[Unit], at_once: bool, state: Any) -> Iterator[Unit]:
    """The units of a sampler that draws from a state, or (None) the process's; not torch's may draw at any time."""

    def draw(call: Callable[..., Any], *args: Any) -> Any:
        nonlocal state
        if state is None:
            return call(*args)
        with isolated(state=state):
            drawn, state = call(*args), random_state()
        return drawn

    def drawn(iterator: Iterator[Unit]) -> Generator[Unit]:
        nonlocal state
        unit = draw(next, iterator, None)
        state = random_state() if state is None and not at_once else state
        while unit is not None:
            yield unit
            unit = next(iterator, None) if at_once else draw(next, iterator, None)

    return drawn(draw(iter, units))  # at once: a loader draws the seed of its workers here
