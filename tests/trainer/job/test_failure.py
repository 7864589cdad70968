"""What ended a run is in its log and its result, the user's frames first."""

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from evener.strategies import ConfigError
from evener.trainer import Result, compose, train
from evener.trainer.checkpoint.checkpoint_io import VerifiedCheckpointIO
from evener.trainer.job.earlier_run import checkpoint_of_name
from evener.trainer.job.log_file import error_sentence, report, users_frames


def config(folder: Path, *overrides: str) -> DictConfig:
    return compose(
        [
            "strategy=single_device", "devices=1", "accelerator=cpu", f"log_dir={folder}/logs", "data=none",
            "module._target_=launched.Told", f"+module.record={folder}/record", "trainer.max_epochs=1", "logger=none",
            "callbacks=none", "trainer.enable_model_summary=false", *overrides,
        ]
    )  # fmt: skip


class Fails(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        raise ValueError("3 features\n    for a layer of 2")


def test_the_frames_of_libraries_are_left_out_but_the_innermost_where_there_is_none_of_the_user() -> None:
    with pytest.raises(ValueError, match="3 features") as raised:
        Fails()(1)
    _, *rest = users_frames(raised.value).splitlines()
    assert [line.rpartition(", in ")[2][:10] for line in rest if line.startswith("  File")] == ["test_the_f", "forward"]
    assert rest[-3:] == [
        "ValueError: 3 features",
        "    for a layer of 2",
        "(2 frames of libraries are left out; HYDRA_FULL_ERROR=1 shows them.)",  # _wrapped_call_impl and _call_impl
    ]
    with pytest.raises(ValueError, match="Expecting") as raised:
        json.loads("{")
    own = raised.value.__traceback__
    shown = users_frames(raised.value.with_traceback(own and own.tb_next)).splitlines()
    assert shown[1].endswith(", in raw_decode")


def test_a_file_that_the_user_misses_is_not_taken_for_the_runs_directory() -> None:
    # it was told as "can't be written (No such file or directory). Set log_dir to a writable directory."
    with pytest.raises(FileNotFoundError) as raised:
        Path("gone.csv").read_text()
    assert "log_dir" not in error_sentence(raised.value)


def test_a_failed_run_says_why_in_its_log_and_result(tmp_path: Path) -> None:
    # Both said nothing: only the console had the reason, under nohup and in a sweep nobody.
    cfg = config(tmp_path, "module._target_=launched.Raises")
    with pytest.raises(KeyError, match="had enough"):
        train(cfg)
    (log,) = tmp_path.rglob("train.log")
    text = log.read_text()
    first, _, rest = text.partition("rank 0 failed: ")[2].partition("KeyError: 'rank 0 had enough'")
    assert 'launched.py", line' in first
    assert "site-packages" not in first
    assert "site-packages" in rest  # all frames follow
    result = Result.read(log.parent)
    assert (result.status, result.reason, result.failed_rank) == ("failed", "KeyError: 'rank 0 had enough'", 0)
    assert result.strategy == "single_device"
    assert result.environment["versions"]["torch"] == torch.__version__
    assert result.failed_at is not None
    assert f"[{result.failed_at[:-3]}" in text  # to the minute


def test_a_refused_run_has_the_sentence_and_no_traceback(tmp_path: Path) -> None:
    cfg = config(tmp_path, "resume=last")
    with pytest.raises(ConfigError, match="no checkpoint found"):
        train(cfg)
    (log,) = tmp_path.rglob("train.log")
    assert "rank 0 failed: resume=last: no checkpoint found under" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert str(Result.read(log.parent).reason).startswith("resume=last: no checkpoint found under")


@pytest.fixture
def cfg(tmp_path: Path) -> DictConfig:
    cfg = config(tmp_path)
    cfg.run_dir = str(tmp_path)
    return cfg


def is_first(cfg: DictConfig, rank: int, reason: str, num_processes: int = 1) -> bool:
    return report(cfg, rank, num_processes, RuntimeError(reason))[1]


def test_without_hard_links_the_first_rank_still_gives_the_reason(
    tmp_path: Path, cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # exFAT, many network and FUSE file systems: result.json and the reason in train.log were both lost.
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    ranks, start = range(8), threading.Barrier(8)

    def fails(rank: int) -> bool:
        start.wait(60)
        return is_first(cfg, rank, f"it broke in {rank}", 8)

    with ThreadPoolExecutor(8) as pool:
        first = [rank for rank, was_first in zip(ranks, pool.map(fails, ranks), strict=True) if was_first]
    assert len(first) == 1
    assert Result.read(tmp_path).failed_rank == first[0]
    assert f"rank {first[0]} failed: RuntimeError: it broke in {first[0]}" in (tmp_path / "train.log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "train.log"]


def test_a_full_disk_does_not_hide_the_reason(tmp_path: Path, cfg: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Result, "write_first", full)
    is_first(cfg, 1, "rank 1 broke", 2)
    assert "rank 1 failed: RuntimeError: rank 1 broke" in (tmp_path / "train.log").read_text()
    monkeypatch.undo()
    cfg.run_dir = str(tmp_path / "gone")
    assert is_first(cfg, 0, "KeyError: 1")


def test_resume_last_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    VerifiedCheckpointIO().save_checkpoint({"state_dict": {"steps": torch.tensor(3)}}, path)
    cfg = OmegaConf.create({"log_dir": str(tmp_path.parent), "name": tmp_path.name, "resume": "last"})
    assert checkpoint_of_name(cfg) == path
