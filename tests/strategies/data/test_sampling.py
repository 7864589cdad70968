"""Which rank reads which sample: checked on plain integers, one simulated rank after the other."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric.utilities.data import _set_sampler_epoch
from pytorch_lightning.utilities import CombinedLoader
from tiny import Streamed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

from evener.strategies import ConfigError
from evener.strategies.core.rng import random_state, set_random_state
from evener.strategies.data.loaders import BatchSizeIs, LoaderRole, RankLoaders, RankShares, goes_whole, source_of
from evener.strategies.data.sampling import Share


def numbers(num: int, batch_size: int | None = 1, **options: Any) -> Any:
    """A loader of 0, 1, ..."""
    return DataLoader(range(num), batch_size, **options)  # type: ignore[arg-type]


class Done:
    def wait(self) -> bool:
        return True


def next_share(own: Any) -> Share | None:
    source = source_of(own)
    return source.passes.latest.shares.popleft() if source is not None and source.passes.latest.shares else None


def rank_loaders(rank: int, num_ranks: int, batch_size_is: BatchSizeIs = "per_device") -> RankLoaders:
    return RankLoaders("ddp", rank, num_ranks, batch_size_is, lambda value: value, lambda values: Done())  # type: ignore[arg-type, return-value]


def read(
    loader: Any, role: LoaderRole, num_ranks: int, batch_size_is: BatchSizeIs
) -> list[list[tuple[Any, Share | None]]]:
    """Every rank's batches with their shares; every rank starts from one random state, as under one seed."""
    state = random_state()
    ranks = []
    for rank in range(num_ranks):
        set_random_state(state)
        own = rank_loaders(rank, num_ranks, batch_size_is).process(loader, role)
        ranks.append([(torch.as_tensor(batch).tolist(), next_share(own)) for batch in own])
    return ranks


@pytest.mark.parametrize("data", [range(5), Streamed(range(5))])
def test_global_divides_every_batch(data: Any) -> None:
    first, second = read(DataLoader(data, 4), "train", 2, "global")
    assert first == [([0, 1], Share(2, 4)), ([4], Share(1, 1))]
    assert second == [([2, 3], Share(2, 4)), ([4], Share(0, 1))]  # a stand-in of weight zero


@pytest.mark.parametrize("batch_size_is", ["per_device", "global"])
@pytest.mark.parametrize("role", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num", [1, 2, 7, 21, 24])
def test_every_sample_is_read_once(num: int, num_ranks: int, role: LoaderRole, batch_size_is: BatchSizeIs) -> None:
    ranks = read(numbers(num, 4, shuffle=True), role, num_ranks, batch_size_is)
    seen = [index for rank in ranks for batch, share in rank if share and share.num for index in batch]
    assert sorted(seen) == list(range(num))
    if role == "train":
        assert len({len(rank) for rank in ranks}) == 1, "every rank takes part in every step"
        for step in zip(*ranks, strict=True):
            assert sum(share.num for _, share in step if share) == step[0][1].total  # type: ignore[union-attr]


class Odd(Sampler[int]):
    """A sampler of nobody's: draws from every global stream, at every index."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        left = list(range(9))
        while left:
            draw = int(torch.randint(9, ())) + int(np.random.randint(9)) + random.randrange(9)
            yield left.pop(draw % len(left))


class Pairs(Sampler[list[int]]):
    """A batch sampler of nobody's: batches of unequal sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([5], [0, 1, 2], [3, 4], [8, 6, 7])

    def __len__(self) -> int:
        return 4


def test_custom_samplers_keep_their_order_and_their_batches() -> None:
    torch.manual_seed(0)
    state = random_state()
    loader = numbers(9, 3, sampler=Odd())
    alone = [batch.tolist() for batch in loader]
    set_random_state(state)
    (one, three), (two, _) = read(loader, "evaluate", 2, "per_device")
    assert [one[0], two[0], three[0] + _[0]] == alone
    first, second = read(numbers(9, batch_sampler=Pairs()), "train", 2, "per_device")
    assert [batch for batch, _ in first] == [[5], [3, 4]]
    assert [batch for batch, _ in second] == [[0, 1, 2], [8, 6, 7]]
    assert [share for _, share in second] == [Share(3, 4), Share(3, 5)]


def test_an_order_does_not_depend_on_what_a_rank_draws_in_between() -> None:
    orders, state = [], random_state()
    for rank in range(2):
        set_random_state(state)
        orders.append([])
        for batch in rank_loaders(rank, 2).process(numbers(9, sampler=Odd()), "train"):
            orders[rank].append(batch.item())
            torch.rand(rank + 1)  # dropout, say
            random.random()
    assert sorted(orders[0] + orders[1][: 9 - len(orders[0])]) == list(range(9))


class Told(Odd):
    """What may want to know the epoch: a sampler, a batch sampler (of a sampler), a dataset or a loader."""

    def __init__(self, sampler: Any = None) -> None:
        super().__init__()
        if sampler is not None:
            self.sampler = sampler


class ToldStream(Told, IterableDataset[int]):
    """Samples that can't be chosen."""


TOLD: dict[str, Callable[[Told, Told, ToldStream], Any]] = {
    "sampler": lambda inner, outer, stream: numbers(9, 2, sampler=inner),
    "batch sampler": lambda inner, outer, stream: numbers(9, batch_sampler=outer),
    "keys": lambda inner, outer, stream: numbers(9, sampler=inner, batch_size=None),
    "stream": lambda inner, outer, stream: DataLoader(stream, 2),
    "no loader": lambda inner, outer, stream: outer,
}


@pytest.mark.parametrize("batch_size_is", ["per_device", "global"])
@pytest.mark.parametrize("kind", TOLD)
def test_who_is_told_the_epoch_is_the_same_as_on_one_device(kind: str, batch_size_is: Any) -> None:
    # A batch sampler's own `set_epoch`, a dataset's and a loader's were called under ddp and never on one device
    # (another order of samples there); a sampler's was called twice.
    told = []
    for processed in (False, True):
        inner = Told()
        receivers = inner, Told(inner), ToldStream()
        loader = TOLD[kind](*receivers)
        own = rank_loaders(1, 2, batch_size_is).process(loader, "train") if processed else loader
        _set_sampler_epoch(own, 3)  # what Lightning calls before every epoch
        told.append([receiver.epochs for receiver in receivers])
    assert told[0] == told[1]


def test_workers_hand_over_batches_in_the_order_of_their_shares() -> None:
    loader = numbers(5, 2, in_order=False)
    own = rank_loaders(0, 2).process(loader, "train")
    assert own.in_order
    assert not loader.in_order  # the user's own is not changed


def test_a_loader_that_is_shared_already_stays_or_is_refused_by_name() -> None:
    loader = numbers(8, 2, sampler=DistributedSampler(range(8), 2, 0, shuffle=False))
    own = rank_loaders(0, 2).process(loader, "train")
    assert [batch.tolist() for batch in own] == [[0, 2], [4, 6]]
    assert next_share(own) is None
    with pytest.raises(ConfigError, match="the loader's DistributedSampler gives each rank its own batches"):
        rank_loaders(0, 2, "global").process(loader, "train")


def test_a_loader_is_not_cut_twice() -> None:
    loader = numbers(8, 2)
    once = rank_loaders(0, 2).process(loader, "train")
    twice = rank_loaders(0, 2).process(once, "train")
    assert [batch.tolist() for batch in twice] == [[0, 1], [4, 5]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_random_samplers_take_rank_0s_order() -> None:
    torch.manual_seed(0)
    expected = list(RandomSampler(range(6)))
    torch.manual_seed(0)
    state = (random_state(), None)
    torch.manual_seed(99)  # this rank's own
    own = RankLoaders("ddp", 1, 2, "per_device", lambda value: state, lambda values: Done())  # type: ignore[arg-type, return-value]
    loader: Any = own.process(numbers(6, 1, sampler=RandomSampler(range(6))), "train")
    assert list(loader.batch_sampler) == [[index] for index in expected[1::2]]


def evaluated(rank: int, mode: str, *loaders: Any) -> list[list[list[int]]]:
    """The samples of each loader in the steps of a rank of 2 that evaluates them combined."""
    ranks = rank_loaders(rank, 2, "global")
    ranks.is_whole = lambda role: goes_whole(combined)
    combined = CombinedLoader([ranks.process(one, "evaluate") for one in loaders], mode)  # type: ignore[arg-type]
    return [[[] if one is None else one.tolist() for one in batches] for batches, *_ in combined]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_batches_that_fall_apart_on_ranks_are_evaluated_whole_by_the_first(mode: str) -> None:
    # 4 + 4 samples, then 4 + 1: rank 1 skipped the second loader's last batch, and lost its part of the first one's
    loaders = numbers(8, 4), numbers(5, 4)
    assert evaluated(0, mode, *loaders) == [[[0, 1, 2, 3], [0, 1, 2, 3]], [[4, 5, 6, 7], [4]]]
    assert evaluated(1, mode, *loaders) == []
    assert evaluated(1, mode, numbers(4, 2), numbers(8, 4)) == [[[1], [2, 3]], [[3], [6, 7]]]  # these stay together


def taken(shares: RankShares, combined: CombinedLoader) -> Share | None:
    shares.begin_batch(combined, 0)
    return shares.current


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_look_at_a_batch_within_a_pass_leaves_the_shares_of_the_others(num_workers: int) -> None:
    # rank 0 of 2 has 2 of 4 samples, and 2 of the last 3; another pass took the shares of the one that trains
    own = rank_loaders(0, 2, "global").process(numbers(7, 4, num_workers=num_workers), "train")
    combined, shares = CombinedLoader(own), RankShares(2, "ddp")
    found = []
    for _ in iter(combined):
        found.append(taken(shares, combined))
        next(iter(own))
    assert found == [Share(2, 4), Share(2, 3)]
    assert own.rank_batches.passes.current.positions == [0, 2]


def test_a_batch_without_a_share_is_refused_by_name() -> None:
    # it was taken for one of which all ranks have as many samples
    own = rank_loaders(0, 2, "global").process(numbers(7, 4), "train")
    combined, shares = CombinedLoader(own), RankShares(2, "ddp")
    next(iter(combined))
    assert taken(shares, combined) == Share(2, 4)
    with pytest.raises(ConfigError, match=r"ddp: it isn't known which part of a global batch .* Read a loader of its"):
        shares.begin_batch(combined, 0)
