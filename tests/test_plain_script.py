"""`Trainer(strategy=DDPStrategy(), devices=2)` in a plain script starts its processes itself, and ends them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evener.strategies import ConfigError, processes

SCRIPT = Path(__file__).parent / "plain_script.py"


def test_a_plain_script_runs_once_and_sees_trained_weights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "log")], timeout=100, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0] == "before"
    assert lines[1].split()[2:] == ["3.00", "0.0000"]


def test_a_failing_rank_of_a_script_ends_it_with_its_traceback(tmp_path: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "log"), "fail"],
        timeout=100, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 of a script" in done.stderr
    assert time.monotonic() - start < 60
    assert (tmp_path / "log").read_text().splitlines() == ["before"]


def test_a_notebook_that_has_used_its_gpu_is_pointed_to_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_IS_INTERACTIVE", True)
    assert processes.start_method(torch.device("cpu")) == "fork"
    assert processes.start_method(torch.device("cuda")) == "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"this notebook has used the GPU already.*Use strategy=dp"):
        processes.start_method(torch.device("cuda"))


def test_importing_leaves_the_gpu_untouched() -> None:
    code = "import torch, evener.trainer, evener.strategies; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
