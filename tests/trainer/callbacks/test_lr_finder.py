"""`callbacks=lr_finder`: the suggestion by hand, the run after it unchanged."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from seen import SHORT
from tiny import Tiny, quiet

from evener.strategies import ConfigError
from evener.trainer import Result, compose, train
from evener.trainer.callbacks import LearningRateFinder

SEARCH = [
    "callbacks=lr_finder", "callbacks.lr_finder.num_steps=24", "data.batch_size=30", "trainer.max_epochs=1",
    "trainer.limit_train_batches=2", "trainer.limit_val_batches=1",
]  # fmt: skip


class Fitted(Tiny):
    lr = 0.1

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(64, 3), batch_size=4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def searched(tmp_path: Path, *words: str, begin: int = 0) -> Result:
    return train(compose([*SHORT, f"log_dir={tmp_path}", "precision=64-true", *SEARCH[begin:], *words]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run without a search."""
    return searched(tmp_path_factory.mktemp("plain"), begin=2)


def rows_of(result: Result) -> list[dict[str, float]]:
    with (Path(result.run_dir) / "lr_finder.csv").open(encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_losses_of_one_process_are_one_devices_and_training_is_as_without_the_search(
    plain: Result, tmp_path: Path
) -> None:
    found = searched(tmp_path)
    expected = [row["smoothed"] for row in rows_of(found)]
    assert len(expected) == 24
    smoothed = [row["smoothed"] for row in rows_of(searched(tmp_path, "strategy=dp", "devices=3"))]
    assert smoothed == pytest.approx(expected, abs=1e-10)
    # under ranks they are rank 0's
    ranks = searched(tmp_path, "strategy=ddp", "devices=2", "strategy.batch_size_is=global")
    assert len(rows_of(ranks)) == 24
    for run in (found, ranks):
        assert run.metrics["val/loss"] == pytest.approx(plain.metrics["val/loss"], abs=1e-12)


def test_the_search_in_a_trainer_of_ones_own_comes_before_training(tmp_path: Path) -> None:
    finder = LearningRateFinder(num_steps=24, update=True)
    trainer = quiet(max_steps=3, callbacks=[finder], default_root_dir=tmp_path)
    module = Fitted(3)
    trainer.fit(module)
    assert (trainer.global_step, len(finder.optimal_lr.results["loss"])) == (3, 24)
    assert module.lr == finder.optimal_lr.suggestion() != 0.1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["callbacks.lr_finder.min_lr=2"], r"expected 0 < min_lr < max_lr .*got min_lr=2, max_lr=1"),
        (["callbacks.lr_finder.num_steps=5"], r"num_steps of at least 20; got .*num_steps=5"),
        (["callbacks.lr_finder.update=true", "callbacks.lr_finder.key=rate"], r"module has no option rate\. Add it"),
        (["module=gan"], r"returned 2, but learning rate finder only works with single optimizer"),
    ],
)
def test_what_can_not_be_searched_is_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, MisconfigurationException), match=sentence):
        searched(tmp_path, *words)


def test_a_run_that_goes_on_is_not_searched(plain: Result, tmp_path: Path) -> None:
    again = searched(tmp_path, f"resume={plain.last_checkpoint}", "trainer.max_epochs=2")
    assert not (Path(again.run_dir) / "lr_finder.csv").exists()
    assert again.num_steps == 4
