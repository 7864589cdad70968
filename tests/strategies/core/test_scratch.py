"""Temporary directories of a killed process are removed by the next run, those of a running one are not."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from evener.strategies.core.scratch import scratch_directory


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def named_after(folder: Path, pid: int) -> Path:
    """A directory as that process would have made it."""
    left = folder.with_name(folder.name.replace(f"-{os.getpid()}-", f"-{pid}-"))
    left.mkdir()
    (left / "config.yaml").touch()
    return left


def test_what_a_killed_process_left_is_removed_by_the_next_run(temporary: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with scratch_directory() as folder:
        dead, alive = named_after(folder, ended.pid), named_after(folder, os.getppid())
        other = temporary / "evener-elsewhere"
        other.mkdir()
        with scratch_directory():
            assert folder.exists()
        assert not dead.exists()
        assert alive.exists()
        assert other.exists()
    assert not folder.exists()
