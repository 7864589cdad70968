"""`callbacks=lr_finder`: the suggestion by hand, the same under every strategy, the run after it unchanged."""

import csv
from pathlib import Path

import pytest
from seen import SHORT, events

from evener.strategies import ConfigError
from evener.trainer import Result, compose, train
from evener.trainer.callbacks import LearningRateFinder

SEARCH = [
    "callbacks=lr_finder", "callbacks.lr_finder.num_steps=24", "data.batch_size=30", "trainer.max_epochs=1",
    "trainer.limit_train_batches=2", "trainer.limit_val_batches=1",
]  # fmt: skip


def searched(tmp_path: Path, *words: str) -> Result:
    return train(compose([*SHORT, f"log_dir={tmp_path}", "precision=64-true", *SEARCH, *words]))


def unsearched(tmp_path: Path) -> Result:
    return train(compose([*SHORT, f"log_dir={tmp_path}", "precision=64-true", *SEARCH[2:]]))


def losses(result: Result) -> list[float]:
    with (Path(result.run_dir) / "lr_finder.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_the_suggestion_is_where_the_loss_falls_fastest_per_factor() -> None:
    finder = LearningRateFinder(min_lr=1e-3, max_lr=1.0, num_steps=30)
    finder.rates = [10 ** (-3 + i / 10) for i in range(30)]
    for i in range(30):
        finder.record(2.0 if i < 15 else 1.0)  # the average falls most between the losses 14 and 15
    assert finder.suggestion == pytest.approx(10 ** (-3 + 15 / 10))
    assert finder.smoothed[0] == 2.0
    weights = [0.9 ** (15 - i) for i in range(16)]
    assert finder.smoothed[15] == pytest.approx((2 * sum(weights[:15]) + 1) / sum(weights))


def test_a_loss_that_only_rises_suggests_nothing() -> None:
    finder = LearningRateFinder()
    finder.rates = [1e-6 * 1.1**i for i in range(30)]
    for i in range(30):
        finder.record(float(i))
    assert finder.suggestion is None


def test_losses_are_the_same_under_every_strategy(tmp_path: Path) -> None:
    expected = losses(searched(tmp_path))
    assert len(expected) == 24
    ranks = ["devices=2", "strategy.batch_size_is=global"]
    for words in (["strategy=dp", "devices=3"], ["strategy=ddp", *ranks], ["strategy=fsdp", *ranks]):
        assert losses(searched(tmp_path, *words)) == pytest.approx(expected, abs=1e-10), words


def test_training_is_the_same_as_without_the_search(tmp_path: Path) -> None:
    plain = unsearched(tmp_path / "plain")
    found = searched(tmp_path / "found")
    assert found.metrics["val/loss"] == pytest.approx(plain.metrics["val/loss"], abs=1e-12)


def test_the_rate_is_set_on_request(tmp_path: Path) -> None:
    result = searched(tmp_path, "callbacks.lr_finder.update=true", "callbacks.lr_finder.num_steps=60")
    with (Path(result.run_dir) / "lr_finder.csv").open(encoding="utf-8") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    slopes = {i: rows[i + 1]["smoothed"] - rows[i - 1]["smoothed"] for i in range(10, len(rows) - 1)}
    best = rows[min(slopes, key=slopes.__getitem__)]["lr"]
    assert events(result).Scalars("lr-AdamW")[-1].value == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["callbacks.lr_finder.min_lr=2"], r"expected 0 < min_lr < max_lr; got min_lr=2 and max_lr=1"),
        (["callbacks.lr_finder.num_steps=5"], r"num_steps must be at least 20; got 5"),
        (["callbacks.lr_finder.update=true", "callbacks.lr_finder.key=rate"], r"module has no option rate\. Add it"),
        (["module=gan"], r"expected automatic optimization with one optimizer; DigitsGAN has 2 and optimizes manually"),
    ],
)
def test_what_can_not_be_searched_is_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        searched(tmp_path, *words)


def test_a_run_that_goes_on_is_not_searched(tmp_path: Path) -> None:
    first = unsearched(tmp_path)
    again = searched(tmp_path, f"resume={first.last_checkpoint}", "trainer.max_epochs=2")
    assert not (Path(again.run_dir) / "lr_finder.csv").exists()
    assert again.num_steps == 4
