"""Divide a loader's batches among ranks; no sample is dropped or read twice.

The loader keeps its own batch sampler (or sampler), and every rank iterates it in the same order. What each rank takes
depends on the meaning of the loader's batch:

    21 samples, batches of 8, 2 ranks        step 0        step 1
    one rank's batch (`Deal`)       rank 0   0..7          16..18
                                    rank 1   8..15         19..20
    the global batch (`Divide`)     rank 0   0..3          8..11      16..18
                                    rank 1   4..7          12..15     19..20

Where a global batch has fewer samples than there are ranks, a training rank without samples joins with a
zero-weight batch (all ranks must reduce gradients), and an evaluating rank skips the step, unless its forward needs
the shards of all ranks. In an evaluation batches without a sample for each rank go whole to the first one, as do those
beside others of which ranks may have other fractions.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ..core.rng import random_state, swapped_random_state
from ..core.types import Unit

Agree: TypeAlias = Callable[[Any], Any]
"""Returns rank 0's value on every rank; all ranks must call it at the same place."""

# Samplers that draw all their randomness when the first index is asked for, from torch's global generator or their own.
_DRAWS_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Share:
    """This rank's part of one global batch: its samples, those of all ranks, and whether any rank has none.

    The number of the batch in its pass is None where ranks read streams of their own.
    """

    num: float
    total: float
    some_empty: bool = field(default=False, compare=False)
    step: int | None = field(default=None, compare=False)


@dataclass(eq=False)
class Pass:
    """What one pass over a rank's batches has yielded so far."""

    shares: deque[Share] = field(default_factory=deque[Share])
    """Of the batches that nobody has taken the share of yet; the consumer takes them from the left."""
    positions: list[int] = field(default_factory=list[int])
    """Of each batch with samples among all ranks' parts."""

    def takes(self, step: int, sizes: Sequence[int], rank: int, joins: bool) -> bool:
        """Note a rank's part of a global batch; False if it has none, and does not join the others' step."""
        if not (sizes[rank] or joins):
            return False
        self.shares.append(Share(sizes[rank], sum(sizes), 0 in sizes, step))
        if sizes[rank]:
            self.positions.append(step * len(sizes) + rank)
        return True


class Passes:
    """Tells the pass that a loop reads from others over the same batches, such as a callback's that looks at one."""

    def __init__(self) -> None:
        self.latest = Pass()
        """The pass that has begun last."""
        self._read = self.latest
        self._reader: object = None

    @property
    def current(self) -> Pass:
        """The pass that a loop reads; without one the latest."""
        return self.latest if self._reader is None else self._read

    def read_by(self, reader: object) -> Pass:
        """The pass that a loop reads by an iterator: the one that had begun last when it took its first batch."""
        if reader is not self._reader or not self._read.shares:
            self._reader, self._read = reader, self.latest
        return self._read


@dataclass(frozen=True)
class Deal:
    """Treats a unit as one rank's batch: `num_ranks` consecutive units make a global batch.

    Args:
        spread: split the largest units of an incomplete last global batch, so that every rank has a part.
        smallest: minimum samples of a part that is split off; BatchNorm can't train on one.
        joined: units that make one part: the only rank that reads takes those of all that compute.
    """

    spread: bool
    smallest: int = 1
    joined: int = 1

    def parts(self, units: Iterator[Unit], num_ranks: int) -> Iterator[list[Unit]]:
        """Yield, for each global batch, one part per rank (an empty list for a rank without samples)."""
        while group := list(islice(units, num_ranks * self.joined)):
            if self.joined > 1:
                group = [[index for unit in group for index in unit]]
            if self.spread and len(group) < num_ranks:
                _spread(group, num_ranks, self.smallest)
            yield group + [[]] * (num_ranks - len(group))

    def count(self, num_units: int, num_ranks: int) -> int:
        """Number of global batches in `num_units` units."""
        return -(-num_units // (num_ranks * self.joined))


@dataclass
class Divide:
    """Treats a unit as the global batch, divided among the ranks by a policy.

    Args:
        policy: computes sizes from the batch size and the number of ranks.
        changes: future policies, as (number of the first global batch, policy); see `change`.
        smallest: minimum samples of a part that is not empty: 1, or 2 for BatchNorm.
        num_cut: global batches cut so far.
    """

    policy: Policy = field(default_factory=Even)
    changes: list[tuple[int, Policy]] = field(default_factory=list)
    smallest: int = 1
    num_cut: int = 0

    def change(self, policy: Policy, at: int) -> None:
        """Use another policy from a global batch on, counted over all epochs, that no rank has cut yet."""
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


Cut: TypeAlias = Deal | Divide
"""Cuts a stream of units into global batches, one part per rank."""


def _spread(units: list[Unit], num_ranks: int, smallest: int) -> None:
    """Split the largest units, in place, until there is one per rank or none can be split."""
    while len(units) < num_ranks:
        unit = max(units, key=num_samples)
        if num_samples(unit) < 2 * smallest:
            return
        at, half = units.index(unit), (len(unit) + 1) // 2
        units[at : at + 1] = [unit[:half], unit[half:]]


def num_samples(unit: Unit) -> int:
    """Return the number of samples in a unit; a key that is not a list counts as one."""
    return len(unit) if isinstance(unit, (list, tuple)) else 1


@dataclass(eq=False)
class RankBatches(Sampler[Any]):
    """Replaces a loader's batch sampler (or sampler) and yields one rank's parts of it.

    Args:
        units: the loader's own batch sampler, or its sampler if it does not collate batches.
        cut: cuts units into global batches.
        joins: whether a rank without samples joins with a zero-weight batch; otherwise it skips the step.
        agree: returns rank 0's random state on all ranks, so that all use the same order.
        is_whole: whether the first rank takes all global batches whole, asked at the beginning of a pass; if not, it
            takes those that have no sample for some rank, or, where this is None, ranks take nothing but their parts.
    """

    units: Iterable[Unit]
    cut: Cut
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
        self.passes.latest = now = Pass()
        rank, start = self.rank, 0
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
        if (sizes := _batch_sizes(self.units)) is None:
            return None
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
    """Take samples of other ranks for a zero-weight batch: two if possible, because BatchNorm can't train on one.

    All are taken where steps get whole batches, perhaps since they take no others.
    """
    taken = [part for part in parts if num_samples(part)]
    if not isinstance(taken[0], (list, tuple)):
        return taken[0]
    indices = [index for part in taken for index in part]
    return indices if is_whole else indices[:2]


def in_one_order(units: Iterable[Unit], rank: int, agree: Agree) -> Iterator[Unit]:
    """Iterate a sampler in rank 0's order on every rank.

    Rank 0 draws as a single process would, so that one device and many see the same order under the same seed. The
    others draw from rank 0's random state and keep their own. A sampler that is not torch's may draw at any time, so
    after its first unit it draws from separate random streams, which training does not affect.
    """
    sampler: Any = getattr(units, "sampler", units) if type(units) is BatchSampler else units
    if type(sampler) is SequentialSampler:
        return iter(units)
    generator = getattr(sampler, "generator", None)
    own = generator.get_state() if isinstance(generator, torch.Generator) else None
    state, generator_state = agree((random_state(), own))
    if generator_state is not None:
        sampler.generator.set_state(generator_state)
    return _Drawn(units, type(sampler) in _DRAWS_AT_ONCE, None if rank == 0 else state)


class _Drawn(Iterator[Unit]):
    """The units of a sampler that draws random numbers.

    Args:
        at_once: whether it draws all of them for the first unit.
        state: from which it draws; None for that of the process, as far as the first unit.
    """

    def __init__(self, units: Iterable[Unit], at_once: bool, state: Any) -> None:
        self._at_once, self._state, self._begins = at_once, state, True
        self._units: Iterator[Unit] = self._draw(iter, units)  # a loader draws the seed of its workers here

    @override
    def __next__(self) -> Unit:
        if self._at_once and not self._begins:
            return next(self._units)
        if (unit := self._draw(next, self._units, None)) is None:
            raise StopIteration
        if self._begins and self._state is None and not self._at_once:
            self._state = random_state()
        self._begins = False
        return unit

    def _draw(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._state is None:
            return call(*args)
        with swapped_random_state(self._state):
            drawn = call(*args)
            self._state = random_state()
        return drawn


def _batch_sizes(sampler: Any) -> list[int] | None:
    """Samples of each batch of a batch sampler, where it cuts a sampler's indices evenly; None if that is not known."""
    if type(sampler) is not BatchSampler:
        return None
    try:
        num, size = len(sampler.sampler), int(sampler.batch_size)  # pyright: ignore[reportArgumentType]  # TypeError if it has none
    except TypeError:
        return None
    full, rest = divmod(num, size)
    return [size] * full + ([rest] if rest and not sampler.drop_last else [])
