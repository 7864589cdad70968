"""What ended a run is in its log and its result, the user's frames first."""

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launching import configured
from omegaconf import DictConfig

from evener.strategies import ConfigError
from evener.trainer import Result, train
from evener.trainer.job.log_file import error_sentence, report, users_frames


def test_of_an_error_without_a_frame_of_the_user_the_innermost_is_shown() -> None:
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


def test_a_refused_run_has_the_sentence_and_no_traceback(tmp_path: Path) -> None:
    cfg = configured(tmp_path, "resume=last")
    with pytest.raises(ConfigError, match="no checkpoint found"):
        train(cfg)
    (log,) = tmp_path.rglob("train.log")
    assert "rank 0 failed: resume=last: no checkpoint found under" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert str(Result.read(log.parent).reason).startswith("resume=last: no checkpoint found under")


@pytest.fixture
def cfg(tmp_path: Path) -> DictConfig:
    cfg = configured(tmp_path)
    cfg.run_dir = str(tmp_path)
    return cfg


def is_first(cfg: DictConfig, rank: int, reason: str, num_processes: int = 1) -> bool:
    return report(cfg, rank, num_processes, RuntimeError(reason))[1]


def test_of_ranks_that_fail_at_once_one_gives_the_reason(tmp_path: Path, cfg: DictConfig) -> None:
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
