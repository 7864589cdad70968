"""`hparams_search=optuna`: the space, pruning, failures, the table; under ddp as in one process."""

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from seen import SHORT

from evener.strategies import ConfigError
from evener.trainer import Result, compose, train
from evener.trainer.cli.train import run_job
from evener.trainer.study.search import Search, opened

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="optuna is not installed; pip install evener[optuna]"
)

SMALL = [
    *SHORT, "hparams_search=optuna", "trainer.max_epochs=2", "trainer.limit_train_batches=4",
    "trainer.limit_val_batches=2", "hparams_search.num_trials=3",
]  # fmt: skip


def search(tmp_path: Path, *words: str) -> Search:
    return Search(compose([*SMALL, *words]), tmp_path)


def rows(tmp_path: Path) -> list[dict[str, str]]:
    (table,) = tmp_path.glob("**/search.csv")
    with table.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(importlib.util.find_spec("optuna") is not None, reason="optuna is installed")
def test_without_optuna_the_search_is_refused_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs the package optuna.* Run pip install 'evener\[optuna\]'"):
        search(tmp_path)


def test_python_is_told_that_a_search_is_many_trainings() -> None:
    with pytest.raises(ConfigError, match=r"hparams_search runs many trainings, and train\(\) one"):
        train(compose(SMALL))


@needs_optuna
def test_the_space_is_what_the_words_say(tmp_path: Path) -> None:
    space = search(tmp_path, "+hparams_search.space.data.batch_size='range(16,65,16)'").space
    lr, channels, hidden, batch = (
        space[f"{key}"] for key in ("module.lr", "module.channels", "module.hidden", "data.batch_size")
    )
    assert (lr.low, lr.high, lr.log) == (0.0005, 0.05, True)
    assert channels.choices == (8, 16, 32)
    assert (hidden.low, hidden.high, hidden.step) == (32, 128, 32)
    assert (batch.low, batch.high, batch.step) == (16, 64, 16)


@needs_optuna
@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("+hparams_search.space.module.lrr='choice(1,2)'", r"lrr is not a value of .*Did you mean module\.lr\?"),
        ("+hparams_search.space.strategy='choice(dp,ddp)'", r"For a group run one search .* -m strategy=a,b"),
        ("hparams_search.space.module.lr='0.1'", r"module\.lr=0\.1: it is not a set of values\. Give choice"),
        ("hparams_search.space.module.lr='interval(2,1)'", r"space\.module\.lr=interval\(2,1\): .*Give choice"),
        ("mode=test", r"mode must be fit; got mode=test"),
    ],
)
def test_what_can_not_be_searched_is_refused(word: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        search(tmp_path, word)


@needs_optuna
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_search_trains_each_trial_in_its_own_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = run_job(compose([*SMALL, f"log_dir={tmp_path}"]))
    found = rows(tmp_path)
    assert [row["job"] for row in found] == ["0", "1", "2"]
    assert best == pytest.approx(min(float(row["value"]) for row in found), rel=1e-5)
    (home,) = (path.parent for path in tmp_path.glob("**/search.csv"))
    for row in found:
        folder = home / f"{int(row['job']):03d}"
        result = Result.read(folder)
        assert result.monitored == pytest.approx(float(row["value"]), rel=1e-5)
        assert not any(name.startswith("test") for name in result.metrics), "trials are not tested"
        channels = row["overrides"].partition("module.channels=")[2].partition(" ")[0]
        assert f"channels: {channels}\n" in (folder / ".hydra" / "config.yaml").read_text()
    out = capsys.readouterr().out
    assert "best: trial" in out
    assert "best checkpoint:" in out


def ran(tmp_path: Path, *outcomes: Any, words: tuple[str, ...] = ()) -> Search:
    """Search with results from a list in place of trainings; an exception is raised."""
    done, left = search(tmp_path, *words), list(outcomes)

    def train(cfg: Any) -> Result:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        metrics = {"val/loss": outcome}
        return Result("fit", "single_device", ["cpu"], 1, str(cfg.run_dir), metrics, "val/loss", outcome)

    done.execute(train)
    return done


@needs_optuna
def test_failing_trials_are_recorded_the_maximum_is_sought_and_a_search_goes_on_in_its_storage(tmp_path: Path) -> None:
    words = (f"hparams_search.storage={tmp_path / 'kept.log'}", "monitor_mode=max")
    first = ran(tmp_path, RuntimeError("out of memory"), 0.5, float("nan"), words=words)
    assert [trial.state.name for trial in first.study.trials] == ["FAIL", "COMPLETE", "FAIL"]
    again = ran(tmp_path, 0.9, 0.4, words=(*words, "hparams_search.num_trials=5"))
    assert [trial.value for trial in again.study.trials][3:] == [0.9, 0.4]
    assert again.best().number == 3


@needs_optuna
@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (ConfigError("data.batch_size=0 is too small."), "batch_size"),
        (None, r"monitor=val/loss was not logged; the run logged val/loss\. Set monitor"),
    ],
)
def test_what_no_trial_can_do_ends_the_search(outcome: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ran(tmp_path, outcome, 0.5, 0.4)


@needs_optuna
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("ranks", [[], ["strategy=ddp", "devices=2", "strategy.batch_size_is=global"]])
def test_a_worse_trial_is_pruned_on_every_rank(ranks: list[str], tmp_path: Path) -> None:
    only_lr = ["hparams_search.space.module.channels=null", "hparams_search.space.module.hidden=null"]
    pruner = ["hparams_search.pruner.n_startup_trials=1", "hparams_search.pruner.n_warmup_steps=0"]
    lr = "hparams_search.space.module.lr='choice(0.005,0.0)'"
    done = search(tmp_path, *only_lr, lr, *pruner, *ranks, "trainer.max_epochs=3", "hparams_search.num_trials=2")
    study = done.optuna.create_study(study_name=str(done.cfg.name), storage=opened(done.storage))
    for rate in (0.005, 0.0):
        study.enqueue_trial({"module.lr": rate})
    done.execute(train)
    assert [trial.state.name for trial in done.study.trials] == ["COMPLETE", "PRUNED"]
    assert [done.results[number].num_steps for number in (0, 1)] == [12, 4], "after the first validation"
