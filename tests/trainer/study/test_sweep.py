"""The table of a sweep, the comparison of its runs, and the debug modes."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from seen import SHORT, command, events
from tensorboard.plugins.hparams import plugin_data_pb2

from evener.trainer import compose, train
from evener.trainer.study.sweep import read_jobs


def test_a_real_multirun_leaves_table_and_comparable_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["-m", *SHORT, "module.lr=0.1,0.001", "trainer.max_epochs=1", "trainer.limit_train_batches=2"]
    assert command(monkeypatch, *arguments) == ""
    (home,) = (tmp_path / "logs" / "digits" / "multirun").iterdir()
    jobs = read_jobs(home)
    assert [job.overrides for job in jobs] == [("module.lr=0.1",), ("module.lr=0.001",)]
    assert {path.name for path in home.iterdir() if path.is_file()} >= {"sweep.csv", "multirun.yaml"}
    for job, rate in zip(jobs, (0.1, 0.001), strict=True):
        assert job.result is not None
        assert job.result.monitored == json.loads((Path(job.result.run_dir) / "result.json").read_text())["monitored"]
        assert events(job.result).Scalars("lr-AdamW")[-1].value == pytest.approx(rate)

    assert jobs[0].result is not None
    content = events(jobs[0].result).SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment  # as the HPARAMS tab reads it
    assert {info.name for info in experiment.hparam_infos} >= {"module/lr", "strategy"}
    assert "lr" not in [info.name for info in experiment.hparam_infos], "told once, as module/lr"
    assert {info.name.tag for info in experiment.metric_infos} == {"val/loss", "val/acc", "train/loss"}


def test_a_sweep_ends_with_one_table_and_the_best_of_the_jobs_that_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["-m", *SHORT, "module.lr=x,0.0,0.003", "trainer.max_epochs=1", "trainer.limit_train_batches=8"]
    sentence = command(monkeypatch, *arguments, "monitor=val/acc", "monitor_mode=max")
    assert "module.lr=x is not allowed. Give a number" in sentence
    told = capsys.readouterr().out
    assert "best: job 2, single_device module.lr=0.003" in told
    (table,) = tmp_path.rglob("sweep.csv")
    with table.open(encoding="utf-8") as file:
        names, failed, *trained = csv.reader(file)
    assert names == ["job", "strategy", "overrides", "samples/s", "memory MiB", "metric", "value", "epoch"]
    assert failed == ["0", "single_device", "module.lr=x", "", "", "failed", "", ""]
    assert [(row[2], row[5], row[7]) for row in trained] == [
        ("module.lr=0.0", "val/acc", "0"), ("module.lr=0.003", "val/acc", "0"),
    ]  # fmt: skip
    assert all(float(row[column]) > 0 for row in trained for column in (3, 4, 6))


def test_debug_fast_runs_three_batches_and_writes_nothing(tmp_path: Path) -> None:
    result = train(compose(["accelerator=cpu", "debug=fast", f"log_dir={tmp_path}"]))
    assert result.num_steps == 3
    assert result.best_checkpoint is None
    assert {path.name for path in Path(result.run_dir).iterdir()} == {"train.log", "result.json"}


# Lightning says that it turned shuffling off
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_debug_overfit_learns_by_heart(tmp_path: Path) -> None:
    result = train(compose([*SHORT, "debug=overfit", f"log_dir={tmp_path}"]))
    assert result.num_steps == 200
    assert result.metrics["train/loss"] < 0.05


def test_debug_profile_counts_the_actions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["trainer.limit_train_batches=3", "trainer.limit_val_batches=1"]
    result = train(compose([*SHORT, "debug=profile", f"log_dir={tmp_path}", *options]))
    told = (Path(result.run_dir) / "train.log").read_text() + capsys.readouterr().out
    assert re.search(r"run_training_batch\s+\|\s+\S+\s+\|\s+3\s", told)
    assert "speed/data_wait_ms" not in events(result).Tags()["scalars"], "nobody measured it"


def traced(home: Path, *words: str) -> list[Any]:
    """The events that `debug=trace` recorded."""
    result = train(compose([*SHORT, f"log_dir={home}", "debug=trace", "trainer.limit_train_batches=8", *words]))
    (trace,) = Path(result.run_dir).glob("fit-trace-*.json")
    return json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.long
def test_debug_trace_names_the_tasks_of_the_pipelines_schedule(tmp_path: Path) -> None:
    recorded = traced(tmp_path, "strategy=model_parallel", "devices=2", "strategy.num_microbatches=3")
    tasks = [event for event in recorded if re.fullmatch(r"[FB]\d( stage \d)?", event["name"])]
    in_order = [event["name"] for event in sorted(tasks, key=lambda event: event["ts"])]
    # 1f1b of 3 micro-batches on 2 stages, in three steps; the last backward is that of the step's loss
    order = ["F0 stage 0", "F1 stage 0", "F0 stage 1", "B0", "F2 stage 0", "F1 stage 1", "B1", "F2 stage 1"]
    assert in_order == 3 * order
    assert any(event["name"].startswith("aten::") for event in recorded)
