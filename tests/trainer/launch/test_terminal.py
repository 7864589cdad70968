"""A terminal, and whoever signals a whole group of processes, tell a run and its ranks at once: it is one request."""

import os
import signal
import time
from pathlib import Path

import pytest
from launching import Run, ends, running, saved_step
from surroundings import CTRL_C, Terminal


def verify_saved(run: Run) -> None:
    """Verify that all ranks have stopped at one step, whose state is saved."""
    last = run.last_steps()
    assert set(last.values()) == {last[0]}
    assert saved_step(run) == last[0] + 1
    assert "Traceback" not in run.output.read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("launcher.max_restarts=2",),
        pytest.param(("strategy=fsdp",), marks=pytest.mark.slow),
        pytest.param(("strategy=balanced_ddp",), marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp, with restarts", "fsdp", "balanced_ddp"],
)
def test_ctrl_c_in_a_terminal_saves(words: tuple[str, ...], tmp_path: Path) -> None:
    with (
        Terminal(tmp_path / "output") as terminal,
        running(tmp_path, "++module.pause_s=0.05", *words, terminal=terminal) as run,
    ):
        run.wait_for_step(3)
        terminal.press(CTRL_C)
        assert ends(run, time.monotonic()) == 130, run.output.read_text()
        verify_saved(run)


@pytest.mark.long
def test_a_terminal_that_closes_lets_the_run_save(tmp_path: Path) -> None:
    with (
        Terminal(tmp_path / "output") as terminal,
        running(tmp_path, "++module.pause_s=0.05", "checkpoint=last", terminal=terminal) as run,
    ):
        run.wait_for_step(3)
        terminal.close()
        assert ends(run, time.monotonic()) == 129, run.output.read_text()
        verify_saved(run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "words", "status"),
    [
        (signal.SIGUSR1, ("launcher.max_restarts=2",), 138),
        pytest.param(signal.SIGTERM, (), 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, ("strategy=fsdp",), 129, marks=pytest.mark.slow),
        (signal.SIGTERM, ("strategy=single_device", "devices=1"), 143),
    ],
    ids=["SIGUSR1, with restarts", "SIGTERM", "SIGHUP, fsdp", "SIGTERM, one process"],
)
def test_signals_to_a_whole_group_twice_are_one_request(
    signum: signal.Signals, words: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    # `timeout` sends its signal to the command, and then to its group
    with running(tmp_path, "++module.pause_s=0.05", *words) as run:
        run.wait_for_step(3, num_ranks=1 if "devices=1" in words else 2)
        os.kill(run.process.pid, signum)
        os.killpg(run.process.pid, signum)
        assert ends(run, time.monotonic()) == status, run.output.read_text()
        verify_saved(run)


@pytest.mark.long
def test_a_rank_that_is_asked_to_stop_stops_a_run_that_may_restart(tmp_path: Path) -> None:
    with running(tmp_path, "++module.pause_s=0.05", "launcher.max_restarts=2") as run:
        run.wait_for_step(3)
        os.kill(run.pid_of(1), signal.SIGTERM)
        assert ends(run, time.monotonic()) == 143, run.output.read_text()
        verify_saved(run)


@pytest.mark.long
def test_a_second_ctrl_c_ends_the_run_at_once_and_says_what_is_lost(tmp_path: Path) -> None:
    with (
        Terminal(tmp_path / "output") as terminal,
        running(tmp_path, "++module.fault=hang", "launcher.shutdown_timeout_s=300", terminal=terminal) as run,
    ):
        run.wait_for_step(3)
        terminal.press(CTRL_C)
        time.sleep(1)
        terminal.press(CTRL_C)
        assert ends(run, time.monotonic()) == 130, run.output.read_text()
        assert "ended at once by a second Ctrl-C, and nothing of this run was saved" in run.output.read_text()
        assert "Traceback" not in run.output.read_text()


@pytest.mark.long
@pytest.mark.parametrize("place", ["while ranks start", "while ranks begin", "while modules are built"])
def test_a_run_that_is_stopped_before_its_first_step_has_not_failed(place: str, tmp_path: Path) -> None:
    # it ended with status 1, and "took longer than shutdown_timeout_s"
    with running(tmp_path, "++module.pause_s=0.5", env={"INTERRUPTED": place}) as run:
        assert ends(run, time.monotonic()) == 130, run.output.read_text()
        assert "Stopped by SIGINT before the first step." in run.output.read_text()
        assert "Traceback" not in run.output.read_text()
        assert not list(tmp_path.glob("logs/*/*/*/result.json"))
