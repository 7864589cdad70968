import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from evener.strategies.data.torch_loader import next_of


def read(iterator: Iterator[Any]) -> list[list[int]]:
    fetch, batches = next_of(iterator), []
    with contextlib.suppress(StopIteration):
        while True:
            batches.append(fetch().tolist())
    return batches


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_those_of_next(num_workers: int) -> None:
    iterator = iter(DataLoader(range(5), batch_size=2, num_workers=num_workers))  # type: ignore[arg-type]
    assert read(iterator) == [[0, 1], [2, 3], [4]]
    assert iterator._num_yielded == 3


def test_a_profiler_sees_the_loader() -> None:
    iterator = iter(DataLoader(range(4), batch_size=2))  # type: ignore[arg-type]
    fetch = next_of(iterator)
    fetch()
    with torch.profiler.profile() as profiler:
        fetch()
    assert any("DataLoader" in event.key for event in profiler.key_averages())


def test_a_patched_next_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", lambda self: torch.tensor([7]))
    assert next_of(iter(DataLoader(range(4), batch_size=2)))().tolist() == [7]  # type: ignore[arg-type]


class Longer(IterableDataset[int]):
    """Yields more than its length says."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


def test_torch_warns_of_a_dataset_that_is_longer_than_it_says() -> None:
    loader = DataLoader(Longer())
    assert len(loader) == 1
    fetch = next_of(iter(loader))
    fetch()
    with pytest.warns(UserWarning, match="was reported to be 1"):
        fetch()


def test_other_iterators_are_read_as_they_are() -> None:
    assert next_of(iter([3, 4]))() == 3
