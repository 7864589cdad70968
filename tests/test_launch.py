"""Whatever happens to a launched run, it ends: soon, with the right status, nothing left behind, the culprit named."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from launching import Run, running

from evener.trainer.checkpoint import find_newest

GONE_S = 20.0
"""Seconds within which every process of a run must be gone: twice what is promised, because machines of CI are slow."""


def ends(run: Run, since_s: float) -> tuple[int, float]:
    """Wait for the end of a run and of all its processes; return status and seconds."""
    status = run.wait(2 * GONE_S)
    while run.survivors():
        assert time.monotonic() - since_s < 2 * GONE_S, f"survivors: {run.survivors()}"
        time.sleep(0.05)
    return status, time.monotonic() - since_s


def saved_step(run: Run) -> int:
    path = find_newest(run.folder)
    assert path is not None
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize(
    ("signum", "to_rank", "status"),
    [(signal.SIGTERM, None, 143), (signal.SIGINT, None, 130), (signal.SIGUSR1, None, 138), (signal.SIGTERM, 1, 143)],
    ids=["SIGTERM to the parent", "SIGINT to the parent", "SIGUSR1 to the parent", "SIGTERM to rank 1"],
)
def test_a_signal_stops_all_ranks_at_one_step_with_a_checkpoint(
    tmp_path: Path, signum: int, to_rank: int | None, status: int
) -> None:
    with running(tmp_path, "++module.pause_s=0.05") as run:
        run.wait_for_step(3)
        start = time.monotonic()
        os.kill(run.process.pid if to_rank is None else run.pid_of(to_rank), signum)
        assert ends(run, start)[0] == status, run.output.read_text()
        last = run.last_steps()
        assert last[0] == last[1]
        assert saved_step(run) == last[0] + 1
        assert "Traceback" not in run.output.read_text()


def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path, "++module.pause_s=0.05") as run:
        run.wait_for_step(1)
        start = time.monotonic()
        os.kill(run.process.pid, signal.SIGKILL)
        status, seconds = ends(run, start)
        assert status == -signal.SIGKILL
        assert seconds < GONE_S / 2


def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path: Path) -> None:
    with running(tmp_path, "++module.fault=raise", "checkpoint=every_n_steps", "checkpoint.every_n_steps=2") as run:
        run.wait_for_step(3)
        status, seconds = ends(run, time.monotonic())
        output = run.output.read_text()
        assert status == 1
        assert seconds < GONE_S
        assert "rank 1 failed" in output
        assert "in misbehave" in output
        assert "rank 1 had enough" in output
        assert saved_step(run) == 2


def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(tmp_path: Path) -> None:
    with running(
        tmp_path, "++module.fault=kill", f"++module.once={tmp_path}/once", "launcher.max_restarts=1",
        "checkpoint=every_n_steps", "checkpoint.every_n_steps=2", "trainer.max_epochs=1",
    ) as run:  # fmt: skip
        assert run.wait(100) == 0, run.output.read_text()
        steps = [step for rank, _, step in run.lines() if rank == 1]
        assert steps == [0, 1, 2, 3, *range(2, 64)]
        assert len(list(tmp_path.glob("logs/*/*/*/train.log"))) == 1


def test_a_hanging_rank_is_gone_soon_after_the_timeout_and_named(tmp_path: Path) -> None:
    with running(tmp_path, "++module.fault=hang", "strategy.timeout_s=3") as run:
        run.wait_for_step(3)
        status, seconds = ends(run, time.monotonic())
        assert status == 1
        assert seconds < 3 + GONE_S
        assert "rank 1 is at step 3, launched.py" in run.output.read_text()
