"""The command, from the configuration to the files of a run."""

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import tiny
import torch
import warm_python
from seen import command, events
from tensorboard.plugins.hparams import plugin_data_pb2

from evener.trainer import ConfigError, Result, compose, train
from evener.trainer.cli.main import main

SHORT = ["accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One run of the default experiment, three epochs long."""
    home = tmp_path_factory.mktemp("logs")
    return train(compose([*SHORT, f"log_dir={home}", "trainer.max_epochs=3", "trainer.log_every_n_steps=5"]))


def test_a_run_fills_one_directory_and_its_result_says_what_it_did(digits: Result) -> None:
    names = {path.name.split(".out.")[0] for path in Path(digits.run_dir).iterdir()}
    assert names == {"events", "train.log", "checkpoints", "result.json"}
    assert Result.read(digits.run_dir) == digits
    assert digits.metrics["test/acc"] > 0.8
    assert digits.monitored == pytest.approx(min(value.value for value in events(digits).Scalars("val/loss")))
    assert f"epoch{digits.monitored_epoch:03d}-" in str(digits.best_checkpoint)
    assert digits.global_batch == 64
    started = digits.environment
    assert started["versions"]["torch"] == torch.__version__
    assert len(started["devices"]) == 1
    assert started["git"] is None or (len(started["git"]["commit"]) == 40 and started["git"]["clean"] in (True, False))


def test_checkpoints_are_plain_files_that_load_with_weights_only(digits: Result) -> None:  # pain 39
    files = list((Path(digits.run_dir) / "checkpoints").rglob("*"))
    assert Path(str(digits.best_checkpoint)) in files
    for file in files:  # a metric's slash made no subdirectory
        assert re.fullmatch(r"[A-Za-z0-9._-]+", file.name)
        assert torch.load(file, weights_only=True)["global_step"] <= digits.num_steps


def test_tensorboard_has_one_point_per_logged_step_and_the_configuration(digits: Result) -> None:  # pain 40
    log = events(digits)
    expected = [step for step in range(digits.num_steps) if (step + 1) % 5 == 0]
    (rate,) = [tag for tag in log.Tags()["scalars"] if tag.startswith("lr-")]
    for tag in ("train/loss", rate):
        assert [event.step for event in log.Scalars(tag)] == expected
    assert len(log.Scalars("val/loss")) == 3
    text = log.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "evener.strategies.SingleDeviceStrategy" in text
    assert "log_every_n_steps: 5" in text


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("trainer.max_epochs=2 trainer.limit_train_batches=3 trainer.log_every_n_steps=50", [2, 5]),
        (
            "trainer.max_epochs=1 trainer.limit_train_batches=8 trainer.accumulate_grad_batches=4 "
            "trainer.log_every_n_steps=1",
            [0, 1],
        ),
    ],
)
def test_short_epochs_and_accumulated_steps_log_one_point_each(
    words: str, steps: list[int], tmp_path: Path
) -> None:  # pain 40
    result = train(compose([*SHORT, f"log_dir={tmp_path}", *words.split()]))
    assert [event.step for event in events(result).Scalars("train/loss")] == steps


def test_hparams_hold_final_metrics_and_no_placeholder(digits: Result) -> None:  # pain 41
    log = events(digits)
    assert "hp_metric" not in log.Tags()["scalars"]
    content = log.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    assert {"val/loss", "val/acc", "test/acc"} <= {info.name.tag for info in experiment.metric_infos}
    assert {"module/lr", "strategy", "seed"} <= {info.name for info in experiment.hparam_infos}
    for tag in ("val/loss", "test/acc"):
        assert log.Scalars(tag)[-1].value == pytest.approx(digits.metrics[tag], abs=1e-6)


@pytest.mark.parametrize("mode", ["validate", "predict"])
def test_other_modes_read_a_checkpoint(mode: str, digits: Result, tmp_path: Path) -> None:
    result = train(compose([*SHORT, f"log_dir={tmp_path}", f"mode={mode}", f"resume={digits.best_checkpoint}"]))
    if mode == "validate":
        assert result.metrics["val/loss"] == pytest.approx(digits.monitored)
    else:
        assert result.predictions is not None
        assert sum(len(batch) for batch in torch.load(result.predictions, weights_only=True)) > 100


def test_resume_best_reads_the_best_checkpoint_of_the_newest_run(digits: Result, tmp_path: Path) -> None:
    shutil.copytree(digits.run_dir, run := tmp_path / "digits" / "run")
    result = train(compose([*SHORT, f"log_dir={tmp_path}", "mode=test", "resume=best"]))
    assert digits.best_checkpoint is not None
    assert result.started_from == str(run / "checkpoints" / Path(digits.best_checkpoint).name)
    assert result.metrics["test/acc"] == pytest.approx(digits.metrics["test/acc"], abs=1e-6)


def test_resume_last_continues_the_newest_run_of_the_name(digits: Result) -> None:
    home = Path(digits.run_dir).parents[2]
    options = ["resume=last", "trainer.max_epochs=4", "test_after_fit=false"]
    result = train(compose([*SHORT, f"log_dir={home}", *options]))
    assert result.num_steps == digits.num_steps * 4 // 3
    assert result.run_dir != digits.run_dir


class Theirs(pl.LightningDataModule):
    """Data of a user, without annotations."""

    def __init__(self, batch_size) -> None:  # type: ignore[no-untyped-def]
        super().__init__()


class Scored(tiny.Scored):
    """`val_loss` of the epochs is 0.5, 0.2 and 0.9."""

    name = "val_loss"

    def __init__(self) -> None:
        super().__init__([0.5, 0.2, 0.9, 0.9])


SCORED = ["module=custom", "module._target_=test_train.Scored", "data=none", "name=scored", *SHORT]


def test_the_result_and_the_table_have_the_best_value_and_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SCORED, "monitor=val_loss"]
    assert command(monkeypatch, *words, "trainer.max_epochs=3") == ""
    assert "0.2000 in epoch 1, the best (last 0.9000)" in capsys.readouterr().out
    first, last = Result.read(next(tmp_path.rglob("result.json")).parent), Path(tmp_path).rglob("last.ckpt")
    assert (first.monitored, first.monitored_epoch, first.metrics["val_loss"]) == pytest.approx((0.2, 1, 0.9))
    result = train(compose([*words, f"resume={next(last)}", "trainer.max_epochs=3"]))
    assert (result.monitored, result.monitored_epoch) == pytest.approx((0.2, 1))
    ranked_by_nothing = train(compose([*words, "checkpoint=last", "trainer.max_epochs=3"]))
    assert (ranked_by_nothing.monitored, ranked_by_nothing.monitored_epoch) == (pytest.approx(0.9), None)


class FromTheOtherNamespace:
    """Stands for a module of the `lightning` package."""


FromTheOtherNamespace.__module__ = "lightning.pytorch.core.module"

MISTAKES = [
    ("strategy=dpp", r"strategy=dpp is unknown\. Choose one of: .*ddp.*single_device"),
    ("stratgy=ddp", r"stratgy is unknown\. Did you mean strategy\?$"),
    ("trainer.max_epoch=3", r"trainer\.max_epoch is unknown\. Did you mean trainer\.max_epochs\?$"),
    ("strategy=ddp strategy.gpu0_chunk=2", r"is not an option of strategy=ddp, but of strategy=balanced_dp\.$"),
    ("devices=0,1", r"Ambiguous value for argument 'devices=0,1'\. For a list use brackets.*for a sweep add -m"),
    ("mode=tset", r"mode=tset is unknown\. Choose one of fit, .*, plan\. Did you mean mode=test"),
    ("resume=null config=run", r"config=run takes .* Name it with resume=last"),
    ("module._target_=no.such.Module", r"module\._target_=no\.such\.Module can't be imported: No module named 'no'"),
    (
        "module._target_=test_train.FromTheOtherNamespace",
        r"derives from lightning's .* Evener runs pytorch_lightning here, which is a different package",
    ),
    ("data=custom data._target_=test_train.Theirs", r"data: .*Theirs refused its options: .*argument: 'batch_size'"),
    (
        "module._target_=evener.examples.digits.DigitsClasifier",
        r"can't be imported: .*DigitsClasifier.* Did you mean .*\.digits\.DigitsClassifier\?$",
    ),
    ("module=custom", r"incomplete: module\._target_ has no value\. Give module\._target_="),
    ("module=custom module.lr=0.1", r"not in module=custom\. Add it with \+module\.lr=0\.1\.$"),
    (
        "module=custom module._target_=test_train.Scored",
        r"data=digits is the example's, and module=custom is yours\. Give data=custom .*, data=none .*, or data=digits",
    ),
    (
        " ".join(SCORED),
        r"monitor=val/loss was not logged\. Logged so far: lr-SGD, val_loss\. Set monitor to one of these\.",
    ),
    ("module=char_lm", r"reads data\.max_length, which DigitsDataModule does not have. Choose data=char_lm, or"),
    ("+lr=0.1", r"^Error: lr is read by nothing, so that it would change nothing\. .* group: \+module\.lr=0\.1 or"),
    ("logger=null", r"A config group can't be null\. Choose one of its options, such as logger=none"),
    ("name=a=b", r"name=a=b can't be parsed .* such as \"name='a=b'\""),
    ("log_dir=/dev/null", r"null.* can't be written \(Not a directory\)\. Set log_dir to a writable directory"),
]


@pytest.mark.parametrize(("words", "sentence"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_told_in_one_sentence(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    told = command(monkeypatch, *words.split())
    assert re.search(sentence, told), told
    assert "\n" not in told
    assert {path.name for path in tmp_path.iterdir()} <= {"logs"}


@pytest.mark.long
def test_an_earlier_runs_module_is_offered_and_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "accelerator=cpu", "module.hidden=8", *SHORT) == ""
    evaluate = ("mode=test", "resume=last", "accelerator=cpu", *SHORT)
    told = command(monkeypatch, *evaluate)
    assert re.search(
        r"does not fit the module: size mismatch for .*\. Give the module the options .* or add config=run",
        told,
    ), told
    told = command(monkeypatch, *evaluate, "config=run", "module.hidden=64")
    assert "config=run takes module.hidden=8 from the run, but module.hidden=64 was given as well" in told
    assert command(monkeypatch, *evaluate, "config=run") == ""
    assert "last.ckpt" in capsys.readouterr().out
    assert command(monkeypatch, "mode=test", "accelerator=cpu", *SHORT) == ""
    assert "untrained" in capsys.readouterr().out


def test_python_composes_a_project_and_is_told_mistakes(tmp_path: Path) -> None:
    project = Path(__file__).parents[2] / "examples" / "user_project" / "conf"
    cfg = compose(["strategy=dp"], config_name="project", config_dir=project)
    assert cfg.strategy._target_.endswith("DataParallelStrategy")
    own = ["module=custom", "module._target_=test_train.Scored"]
    assert [compose([*own, "data=none", *name]).name for name in ([], ["name=mine"])] == ["Scored", "mine"]
    with pytest.raises(ConfigError, match=r"^trainer\.max_epoch is unknown\. Did you mean trainer\.max_epochs\?$"):
        compose(["trainer.max_epoch=3"], config_name="project", config_dir=project)
    with pytest.raises(ConfigError, match=r"^strategy=dpp is unknown"):
        compose(["strategy=dpp"])
    with pytest.raises(ConfigError, match=r"has no train\.yaml\. Give the root configuration's name"):
        compose(config_dir=tmp_path)


def test_the_traceback_of_a_mistake_is_shown_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "at least one device" in command(monkeypatch, "devices=0")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="devices=0: at least one device is needed"):
        main()


def run_command(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    train_py = Path(__file__).parents[2] / "train.py"
    run = warm_python.run(train_py, *arguments, *SHORT, cwd=home, env={**os.environ, **environment})
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def test_ddp_leaves_one_of_everything(tmp_path: Path) -> None:  # pain 7
    run = run_command(tmp_path, "strategy=ddp", "devices=2", "trainer.max_epochs=1", "trainer.limit_train_batches=4")
    (run_dir,) = (tmp_path / "logs" / "digits" / "ddp").iterdir()
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert len(list(tmp_path.rglob(".hydra"))) == 1
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == 1
    (log,) = tmp_path.rglob("*.log")
    lines = Counter(line for line in log.read_text().splitlines() if line.startswith("["))
    assert lines, "the log is not empty"
    assert max(lines.values()) == 1, "each line once"
    result = Result.read(run_dir)
    assert (result.num_processes, result.global_batch) == (2, 128)
    assert run.stdout.count("fit finished") == 1


SCRIPT = """
from pathlib import Path
Path("side_effects").open("a").write("once\\n")
import torch
from evener.trainer import compose, train
result = train(compose(["strategy=ddp", "devices=2", "accelerator=cpu", "trainer.max_epochs=1",
                        "trainer.limit_train_batches=4", "trainer.enable_progress_bar=false"]))
weights = torch.load(result.best_checkpoint, weights_only=True)
Path("after_fit").open("a").write(f"{weights['global_step']}\\n")
"""


@pytest.mark.long
def test_the_script_runs_once_and_sees_trained_weights(tmp_path: Path) -> None:  # pain 24
    (tmp_path / "script.py").write_text(SCRIPT)
    done = warm_python.run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "side_effects").read_text() == "once\n"
    assert (tmp_path / "after_fit").read_text() == "4\n"


def test_a_sweep_runs_every_job_in_its_own_directory(tmp_path: Path) -> None:  # pain 8
    jobs = ["strategy=ddp", "devices=2", "module.lr=0.1,0.01"]
    run_command(tmp_path, "-m", *jobs, "trainer.max_epochs=1", "trainer.limit_train_batches=2")
    results: list[Any] = [Result.read(path.parent) for path in sorted(tmp_path.rglob("result.json"))]
    assert [(result.strategy, result.num_processes) for result in results] == [("ddp", 2), ("ddp", 2)]
    assert len({result.run_dir for result in results}) == 2
    # what the ranks built their module with
    rates = [torch.load(result.best_checkpoint, weights_only=True)["hyper_parameters"]["lr"] for result in results]
    assert rates == [0.1, 0.01]
