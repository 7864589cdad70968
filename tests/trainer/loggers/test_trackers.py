"""Trackers: one run of the tracker per training, under ddp and after a restart; hyper-parameters that suit all."""

import importlib
import importlib.util
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import warm_python

from evener.strategies import ConfigError
from evener.trainer import compose
from evener.trainer.cli.train import prepare
from evener.trainer.config.checks import entries
from evener.trainer.job.run import build
from evener.trainer.loggers.journal import hyperparameters
from evener.trainer.loggers.trackers import run_key


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def needs(package: str) -> Any:
    return pytest.mark.skipif(not has(package), reason=f"{package} is not installed; pip install evener[{package}]")


def prepared(tmp_path: Path, *overrides: str) -> Any:
    return prepare(
        compose([f"run_dir={tmp_path / 'dp' / 'now'}", f"log_dir={tmp_path}", "accelerator=cpu", *overrides])
    )


def test_several_loggers_at_once_may_be_ones_own(tmp_path: Path) -> None:
    own = ["logger.custom._target_=pytorch_lightning.loggers.CSVLogger", f"+logger.custom.save_dir={tmp_path}"]
    parts = build(prepared(tmp_path, "logger=[tensorboard,csv,custom]", *own))
    loggers = [
        f"{type(logger).__module__.partition('.')[0]} {type(logger).__name__}" for logger in parts.trainer.loggers
    ]
    assert loggers == ["evener TensorBoardLogger", "evener CSVLogger", "pytorch_lightning CSVLogger"]
    assert entries("logger", {"_target_": "a.B"}) == [("logger", {"_target_": "a.B"})]  # a group of one object


@pytest.mark.parametrize(("word", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("comet", "comet_ml")])
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(
    word: str, package: str, tmp_path: Path
) -> None:
    if has(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=rf"logger={word} needs .* Run pip install 'evener\[{word}\]', or choose"):
        build(prepared(tmp_path, f"logger={word}"))


def test_hyperparameters_name_the_strategy_no_folder_is_a_file_and_a_run_keeps_its_key(tmp_path: Path) -> None:
    values = hyperparameters(prepared(tmp_path, "strategy=dp", "devices=2"))
    assert (values["strategy/_target_"], values["module/_target_"]) == ("dp", "DigitsClassifier")
    assert values["strategy/recompute"] == "never"
    folders = {name.rpartition("/")[0] for name in values}
    assert folders & values.keys() == set()
    assert run_key("logs/a/dp/1") == run_key("logs/a/dp/1") != run_key("logs/a/dp/2")


def trained(tmp_path: Path, *words: str) -> Path:
    """Train in a new project; return its directory."""
    done = warm_python.run("-c", "from evener.trainer.cli.tool import main; main()", "new", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "mine"
    (home / "crash.py").write_text(CRASH, encoding="utf-8")
    done = warm_python.run(
        "train.py", "accelerator=cpu", "trainer.max_epochs=2", "tags=[a,b]", "notes=first", *words,
        cwd=home, env={**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return home


CRASH = """
import os

import pytorch_lightning as pl


class Crash(pl.Callback):
    def on_train_epoch_start(self, trainer, module):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and trainer.current_epoch == 1 and trainer.global_rank == 1:
            os._exit(3)
"""
"""Ends a process in the second epoch of the first start."""
RANKS = ["strategy=ddp", "devices=2"]
RESTARTED = [*RANKS, "launcher.max_restarts=1", "+callbacks.crash._target_=crash.Crash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of SQLAlchemy
@pytest.mark.filterwarnings("ignore:.*noload.*")
@pytest.mark.parametrize(("store", "how"), [("sqlite:///runs.db", RESTARTED), ("file:runs", RANKS)])
def test_mlflow_has_one_run_per_training(
    store: str, how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = importlib.import_module("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it
    home = trained(tmp_path, "logger=mlflow", f"logger.mlflow.tracking_uri={store}", *how)
    monkeypatch.chdir(home)
    client = mlflow.tracking.MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'mine'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name.startswith("ddp/")
    assert run.info.status == "FINISHED"
    assert run.data.tags.items() >= {"a": "true", "b": "true", "mlflow.note.content": "first"}.items()
    assert (run.data.params["strategy/_target_"], run.data.params["module/lr"]) == ("ddp", "0.01")
    history = client.get_metric_history(run.info.run_id, "val/loss")
    assert len({point.step for point in history}) == 2
    assert run.data.metrics["test/acc"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("wandb")
@pytest.mark.parametrize("how", [RANKS, RESTARTED], ids=["ddp", "restarted"])
def test_wandb_has_one_run_per_training(how: list[str], tmp_path: Path) -> None:
    home = trained(tmp_path, "logger=wandb", "logger.wandb.offline=true", *how)
    (run_dir,) = (home / "logs" / "mine" / "ddp").iterdir()
    ids = {path.name.rpartition("-")[2] for path in (run_dir / "wandb").glob("offline-run-*")}
    assert ids == {run_key(run_dir)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("comet_ml")
def test_comet_offline_writes_one_archive(tmp_path: Path) -> None:
    """Lightning's logger disables the experiment with `online=False`, so that nothing was written."""
    home = trained(tmp_path, "logger=comet", "logger.comet.online=false", *RANKS)
    (archive,) = (home / "logs" / "mine" / "ddp").glob("*/*.zip")
    with zipfile.ZipFile(archive) as file:
        text = b"".join(map(file.read, file.namelist()))
    assert b"val/loss" in text
    assert b"module/lr" in text
