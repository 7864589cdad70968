"""Iterate samplers in one order on all ranks, and seed the workers of loaders."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from lightning_fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from ..core.rng import random_state, swapped_random_state
from ..core.types import Unit

Agree: TypeAlias = Callable[[Any], Any]
"""Returns rank 0's value on every rank; all ranks must call it at the same place."""

# Samplers that draw all their randomness when the first index is asked for, from torch's global generator or their own.
_DRAWS_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def in_one_order(units: Iterable[Unit], rank: int, agree: Agree) -> Iterator[Unit]:
    """Iterate a sampler in rank 0's order on every rank.

    Rank 0 draws as a single process would, so that one device and many see the same order under the same seed. The
    others draw from rank 0's random state and keep their own. A sampler that is not torch's may draw at any time, so
    after its first unit it draws from separate random streams, which training does not affect.
    """
    sampler = getattr(units, "sampler", units) if type(units) is BatchSampler else units
    return iter(units) if type(sampler) is SequentialSampler else _drawn(units, sampler, rank, agree)


def _drawn(units: Iterable[Unit], sampler: Any, rank: int, agree: Agree) -> Iterator[Unit]:
    generator = getattr(sampler, "generator", None)
    own = generator.get_state() if isinstance(generator, torch.Generator) else None
    state, generator_state = agree((random_state(), own))
    if generator_state is not None:
        sampler.generator.set_state(generator_state)

    def draw(call: Callable[..., Any], *args: Any) -> Any:
        nonlocal state
        with swapped_random_state(state):
            drawn = call(*args)
            state = random_state()
        return drawn

    def drawn(iterator: Iterator[Unit]) -> Iterator[Unit]:
        nonlocal state
        first = next(iterator, None) if rank == 0 else draw(next, iterator, None)
        if first is None:
            return
        yield first
        if type(sampler) in _DRAWS_AT_ONCE:
            yield from iterator
            return
        if rank == 0:
            state = random_state()
        while (unit := draw(next, iterator, None)) is not None:
            yield unit

    return drawn(iter(units) if rank == 0 else draw(iter, units))  # a loader draws the seed of its workers here


def seed_worker(worker: int, rank: int, then: Callable[[int], None] | None) -> None:
    """Seed python, numpy and torch of a worker by rank and worker, then call the loader's own `worker_init_fn`."""
    pl_worker_init_function(worker, rank)
    if then is not None:
        then(worker)
