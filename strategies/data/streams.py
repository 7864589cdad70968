"""Wrap loaders; divide among ranks those without an index (iterable datasets, any iterable)."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from ..batch.layout import tell_whole
from ..batch.structure import BatchStructure, Path, walk
from ..core.errors import ConfigError, PartsDiffer
from ..core.types import Batch
from .sampling import Agree, Divide, Pass, Passes, Share, in_one_order


class Around:
    """A loader around another one, whose attributes it has."""

    loader: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def evener_original(self) -> Any:
        """The user's loader, where this one is given to a trainer once more; see `RankLoaders`."""
        return getattr(self.loader, "evener_original", self.loader)

    @property
    def _iterator(self) -> Any:
        """The iterator on which Lightning shuts down a DataLoader's workers."""
        return self.loader._iterator  # AttributeError if it has none

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator


@dataclass(eq=False)
class Stream(Around):
    """A loader whose batches are divided as they are read; `first_batch` begins a pass, until it is used."""

    loader: Iterable[Batch]
    strategy: str
    passes: Passes = field(default_factory=Passes, init=False)
    structure: BatchStructure = field(default_factory=BatchStructure, kw_only=True)
    first_batch: Batch = field(default=None, init=False)


@dataclass(eq=False)
class Lockstep(Stream):
    """Gives every rank its own stream, until the longest ends; others then repeat their last batch with weight zero."""

    num_ranks: int
    sum_over_ranks: Callable[[Tensor], Work]

    def __iter__(self) -> Iterator[Batch]:
        return self._in_step(iter(self.loader), self.passes.begin())  # at once, as on one device

    def _in_step(self, iterator: Iterator[Batch], now: Pass) -> Iterator[Batch]:
        last = None
        batch, num, sums, work = self._fetch(iterator)
        self.first_batch = batch
        while True:
            work.wait()
            total, num_alive = sums.tolist()
            if not num_alive:
                return
            last = last if batch is None else batch
            if last is None:
                raise ConfigError(
                    f"{self.strategy}: this rank's loader yielded no batch, but others did. Give every rank at least "
                    "one batch, or set batch_size_is=global with a stream that is the same on all ranks."
                )
            now.shares.append(Share(num, total, num_alive < self.num_ranks))
            batch, num, sums, work = self._fetch(iterator)
            yield last
            self.first_batch = None

    def _fetch(self, iterator: Iterator[Batch]) -> tuple[Batch, float, Tensor, Work]:
        batch = next(iterator, None)
        num = 0.0 if batch is None else float(self.structure.num_samples(batch) or 1)
        sums = torch.tensor([num, float(batch is not None)], dtype=torch.float64)
        return batch, num, sums, self.sum_over_ranks(sums)


@dataclass(eq=False)
class Divided(Stream):
    """Divides a stream of global batches that every rank reads; the first rank takes whole what can't be cut."""

    divide: Divide
    rank: int
    num_ranks: int
    joins: bool
    agree: Agree
    is_whole: Callable[[], bool | None] | None = None
    _told: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[Batch]:
        return self._parts(in_one_order(self.loader, self.rank, self.agree), self.passes.begin())

    def _parts(self, batches: Iterator[Batch], now: Pass) -> Iterator[Batch]:
        self.first_batch = first = next(batches, None)
        self._verify_same(first)
        is_whole = self.num_ranks == 1 or (self.is_whole and self.is_whole())
        for step, batch in enumerate(() if first is None else chain([first], batches)):
            total = self.structure.num_samples(batch) or int(self.num_ranks == 1)  # what is not cut may be anything
            if not total:
                raise ConfigError(
                    f"{self.strategy}: batch_size_is=global can't cut a batch of type {type(batch).__name__}: it holds "
                    "nothing to count samples by. Put tensors into it, or set batch_size_is=per_device."
                )
            sizes = self.divide.sizes(total, self.num_ranks)
            own = None if is_whole or (is_whole is not None and 0 in sizes) else self._part(batch, sizes)
            if own is None:
                own, sizes = batch, [total, *[0] * (self.num_ranks - 1)]
            if now.takes(step, sizes, self.rank, self.joins):
                yield own
                self.first_batch = None

    def _part(self, batch: Batch, sizes: list[int]) -> Batch | None:
        """This rank's part of a batch, or samples to stand in for it; None if the batch is better left whole."""
        rank, stand_in = self.rank, min(2, sum(sizes))
        try:
            parts = self.structure.split(batch, sizes)  # on all ranks, which must find the same
            return parts[rank] if sizes[rank] else self.structure.split(batch, [stand_in, sum(sizes) - stand_in])[0]
        except PartsDiffer as exc:
            if not self._told:
                self._told = True
                how = "the first rank computes them whole; strategy.batch_dims says what it is"
                tell_whole(self.strategy, exc, how)
            return None

    def _verify_same(self, batch: Batch | None) -> None:
        """Refuse a stream whose first batch is another one than rank 0's; every rank must call it."""
        own = None if batch is None else dict(_sums(batch))
        if own != self.agree(own):
            raise ConfigError(
                f"{self.strategy}: batch_size_is=global divides a stream that is the same on all ranks, but rank "
                f"{self.rank} has read another first batch than rank 0. Have the dataset yield all samples on every "
                "rank, or, if it shards itself by rank, set batch_size_is=per_device."
            )

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType]  # TypeError if it has none


def _sums(batch: Batch) -> Iterator[tuple[Path, tuple[torch.Size, float | None]]]:
    """The shapes of a batch's tensors, and their sums to seven digits; None for one that is not finite."""
    for path, value in walk(batch):
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex():
            total = float(value.sum(dtype=torch.float64))
            yield path, (value.shape, float(f"{total:.6e}") if math.isfinite(total) else None)
