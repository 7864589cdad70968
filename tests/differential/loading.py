"""Loaders of every kind over the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils import data

from .batches import Points, collate

if TYPE_CHECKING:
    from .cases import Batches, Case, Loading

KINDS = (
    "plain", "shuffle", "generator", "replacement", "weighted", "subset", "sampler_with_epoch", "batch_sampler",
    "bucket",
    "iterable", "iterable_unsized", "batches", "no_batching", "dict", "list", "min_size", "max_size", "max_size_cycle",
    "combined_list",
)  # fmt: skip
EVAL_KINDS = ("plain", "two", "sequential", "batch_sampler", "iterable", "batches", "max_size", "min_size", "none")
PAIRED = ("dict", "list", "min_size", "max_size", "max_size_cycle", "combined_list")


class Reversed(data.Sampler[int]):
    """A sampler whose order depends on the epoch it is told."""

    def __init__(self, num: int) -> None:
        self.num, self.epoch = num, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i * 2 + self.epoch) % self.num for i in range(self.num)])

    def __len__(self) -> int:
        return self.num


class Buckets(data.Sampler[list[int]]):
    """A batch sampler with batches of unequal sizes, whose order depends on the epoch it is told."""

    def __init__(self, num: int, batch_size: int) -> None:
        self.num, self.epoch = num, 0
        self.cuts = list(pairwise([0, *range(max(1, batch_size // 2), num, batch_size), num]))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([order[a:b] for a, b in self.cuts])

    def __len__(self) -> int:
        return len(self.cuts)


class Stream(data.IterableDataset[Any]):
    """The samples of a data set, one after the other."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __iter__(self) -> Iterator[Any]:
        return iter([self.points[i] for i in range(len(self.points))])


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.points)


class Whole(data.Dataset[Any]):
    """A data set whose items are batches."""

    def __init__(self, points: Points, batches: Batches, size: int) -> None:
        self.points, self.batches, self.size = points, batches, size

    def __len__(self) -> int:
        return -(-len(self.points) // self.size)

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        rows = range(index * self.size, min((index + 1) * self.size, len(self.points)))
        return collate(self.batches, [self.points[i] for i in rows])


class Batched:
    """An iterable of batches that is no DataLoader."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        return map(self.whole.__getitem__, range(len(self.whole)))


def train_loader(case: Case) -> Any:
    """What is given to `fit` for training."""
    loading = case.loading
    points = Points(loading.num, case.batches.boxes)
    if loading.kind not in PAIRED:
        return one_loader(loading.kind, points, case.batches, loading.batch_size, loading.drop_last)
    other = Points(loading.second[0], case.batches.boxes, seed=1)
    a = one_loader("plain", points, case.batches, loading.batch_size, loading.drop_last)
    b = one_loader("plain", other, case.batches, loading.second[1], loading.drop_last)
    if loading.kind == "dict":
        return {"a": a, "b": b}
    if loading.kind == "list":
        return [a, b]
    named = ([a, b], "max_size_cycle") if loading.kind == "combined_list" else ({"a": a, "b": b}, loading.kind)
    return CombinedLoader(*named)


def eval_loader(case: Case) -> Any:
    """What is given for validation, test and prediction; None for no validation."""
    loading = case.loading
    points = Points(loading.eval_num, case.batches.boxes, seed=2)
    if loading.eval_kind == "none":
        return None
    make = partial(one_loader, batches=case.batches, size=loading.eval_batch_size, drop_last=False)
    if loading.eval_kind in ("two", "sequential", "max_size", "min_size"):
        both = [make("plain", points), make("plain", Points(5, case.batches.boxes, seed=3))]
        return both if loading.eval_kind == "two" else CombinedLoader(both, loading.eval_kind)
    return make(loading.eval_kind, points)


def num_batches(loader: Any) -> list[int] | None:
    """Batches that each of the loaders gives; None where one of them has no length."""
    combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
    try:
        return [len(one) for one in combined.flattened]
    except TypeError:
        return None


def is_paired(loading: Loading, training: bool) -> bool:
    """Whether a batch is a collection of the batches of several loaders."""
    return loading.kind in PAIRED if training else loading.eval_kind in ("max_size", "min_size")


def one_loader(kind: str, points: Points, batches: Batches, size: int, drop_last: bool) -> Any:
    """A loader over the samples."""
    num, cut, seeded = len(points), partial(collate, batches), torch.Generator().manual_seed(5)
    plain = partial(data.DataLoader, points, size, collate_fn=cut, drop_last=drop_last)
    shuffled = {"plain": {}, "shuffle": {"shuffle": True}, "generator": {"shuffle": True, "generator": seeded}}
    if kind in shuffled:
        return plain(**shuffled[kind])
    samplers = {
        "replacement": lambda: data.RandomSampler(points, replacement=True, num_samples=num, generator=seeded),
        "weighted": lambda: data.WeightedRandomSampler([1.0 + i for i in range(num)], num, generator=seeded),
        "subset": lambda: data.SubsetRandomSampler(range(0, num, 2), generator=seeded),
        "sampler_with_epoch": lambda: Reversed(num),
    }
    if kind in samplers:
        return plain(sampler=samplers[kind]())
    if kind == "batch_sampler":
        sampler = data.BatchSampler(data.SequentialSampler(points), size, drop_last)
        return data.DataLoader(points, batch_sampler=sampler, collate_fn=cut)
    if kind == "bucket":
        return data.DataLoader(points, batch_sampler=Buckets(num, size), collate_fn=cut)
    if kind in ("iterable", "iterable_unsized"):
        stream = SizedStream(points) if kind == "iterable" else Stream(points)
        return data.DataLoader(stream, size, collate_fn=cut, drop_last=drop_last)
    whole = Whole(points, batches, size)
    return Batched(whole) if kind == "batches" else data.DataLoader(whole, batch_size=None)
