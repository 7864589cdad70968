"""A batch is fetched without the loader's own bookkeeping, which is as visible as ever."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from evener.trainer.checkpoint._loader_state import next_of


def test_a_profiler_sees_the_loader() -> None:
    fetch = next_of(iter(DataLoader(range(4), batch_size=2)))  # type: ignore[arg-type]
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
    len(loader)
    fetch = next_of(iter(loader))
    fetch()
    with pytest.warns(UserWarning, match="was reported to be 1"):
        fetch()
