"""Random streams under several ranks: one common order of samples, and separate streams for everything else."""

import random
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning_fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from .types import Unit

Agree: TypeAlias = Callable[[Any], Any]
"""Returns rank 0's value on every rank; called by all ranks at the same place."""

RandomState: TypeAlias = tuple[torch.Tensor, Any, Any]
"""The global random states of torch (cpu), numpy and python."""

# Samplers that draw all their randomness when the first index is asked for, from torch's global generator or their own.
_DRAWS_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def in_one_order(units: Iterable[Unit], rank: int, agree: Agree) -> Iterator[Unit]:
    """Iterate a sampler in rank 0's order on every rank.

    Rank 0 draws as a single process would, so that one device and many see the same order under the same seed. The
    others draw from rank 0's random state, and keep their own. A sampler that is not torch's may draw at any time:
    after its first unit it has random streams of its own, which training can't disturb.
    """
    sampler = getattr(units, "sampler", units) if type(units) is BatchSampler else units
    if type(sampler) is SequentialSampler:
        yield from units
        return
    iterator = iter(units)
    stream = _Stream(agree((random_state(), _generator_state(sampler))), sampler)
    first = next(iterator, None) if rank == 0 else stream.next(iterator)
    if first is None:
        return
    yield first
    if type(sampler) in _DRAWS_AT_ONCE:
        yield from iterator
        return
    if rank == 0:
        stream.state = random_state()
    while (unit := stream.next(iterator)) is not None:
        yield unit


@dataclass
class _Stream:
    """A random state that only a sampler draws from."""

    state: "RandomState"

    def __init__(self, agreed: tuple["RandomState", torch.Tensor | None], sampler: Any) -> None:
        self.state, generator_state = agreed
        if generator_state is not None:
            sampler.generator.set_state(generator_state)

    def next(self, iterator: Iterator[Unit]) -> Unit | None:
        with swapped_random_state(self.state):
            unit = next(iterator, None)
            self.state = random_state()
        return unit


def _generator_state(sampler: Any) -> torch.Tensor | None:
    generator = getattr(sampler, "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def random_state() -> RandomState:
    """The global random states of torch (cpu), numpy and python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_state(state: RandomState) -> None:
    """Set what `random_state` returned."""
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextmanager
def swapped_random_state(state: RandomState) -> Generator[None]:
    """Draw from another random state for a while."""
    own = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(own)


def seed_rank(rank: int) -> None:
    """Give a rank random streams of its own, made of the common seed; rank 0 keeps the common ones.

    Called once the data are set up, because ranks must agree there (on a random split, say).
    """
    if rank == 0:
        return
    seeds = np.random.SeedSequence([torch.initial_seed() % 2**63, rank]).generate_state(6)
    torch.manual_seed(int(seeds[0]) << 32 | int(seeds[1]))
    random.seed(int(seeds[2]) << 32 | int(seeds[3]))
    np.random.seed(seeds[4:])


def worker_seeds(rank: int, then: Callable[[int], None] | None) -> Callable[[int], None]:
    """What a loader's worker does first: random streams of its own in python, numpy and torch, by rank and worker.

    Args:
        rank: the rank that starts the workers.
        then: the loader's own `worker_init_fn`, called afterwards.
    """
    return partial(_seed_worker, rank=rank, then=then)


def _seed_worker(worker: int, rank: int, then: Callable[[int], None] | None) -> None:
    pl_worker_init_function(worker, rank)
    if then is not None:
        then(worker)
