"""Loaders with a state of their own are resumed where they were; a batch is read as visibly as ever."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from pytorch_lightning.callbacks import ModelCheckpoint
from tiny import Tiny, quiet
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from evener.strategies import ConfigError, DDPStrategy
from evener.trainer.checkpoint._loader_state import next_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Numbers(IterableDataset[Any]):
    """1 to 10; remembers the last one."""

    def __init__(self) -> None:
        self.last = 0

    def __iter__(self) -> Any:
        while self.last < 10:
            self.last += 1
            yield torch.tensor([float(self.last)])
        self.last = 0


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {"last": self.dataset.last}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.last = state["last"]  # type: ignore[attr-defined]


class Recording(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.seen = list[list[int]]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.flatten().int().tolist())
        return super().training_step(batch, batch_idx)


def fit(folder: Path, resumed: Path | None = None, **options: Any) -> list[list[int]]:
    module = Recording()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    quiet(max_epochs=2, callbacks=[saver], **options).fit(module, Stateful(Numbers(), 2), ckpt_path=resumed)
    return module.seen


def test_a_batch_that_was_read_ahead_is_not_lost(tmp_path: Path) -> None:
    # whether a batch is the last one shows by reading one more, which the loader's state counted as trained on
    whole = fit(tmp_path / "whole")
    assert whole == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]] * 2
    for num_steps in (1, 2, 3, 4):
        saved = tmp_path / "whole" / f"step={num_steps}.ckpt"
        assert fit(tmp_path / "resumed", saved) == whole[num_steps:]


def _fit_on_rank(folder: Path) -> None:
    warnings.simplefilter("ignore")
    fit(folder, strategy=DDPStrategy(batch_size_is="global", timeout_s=60), devices=2)


def test_a_position_is_not_given_to_a_loader_with_another_state(tmp_path: Path) -> None:
    run_ranks(_fit_on_rank, 2, tmp_path, timeout_s=120)
    with pytest.raises(ConfigError, match="can't tell a Stateful where it was"):
        fit(tmp_path / "resumed", tmp_path / "step=1.ckpt")


class Longer(IterableDataset[int]):
    """Yields more than its length says."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


def test_a_batch_is_read_as_visibly_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
    with torch.profiler.profile() as profiler:
        next_of(iter(loader))()
    assert any("DataLoader" in event.key for event in profiler.key_averages())
    len(longer := DataLoader(Longer()))  # type: ignore[arg-type]
    fetch = next_of(iter(longer))
    fetch()
    with pytest.warns(UserWarning, match="was reported to be 1"):
        fetch()
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", lambda self: torch.tensor([7]))
    assert next_of(iter(loader))().tolist() == [7]
