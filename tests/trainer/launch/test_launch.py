"""Whatever happens to a launched run, it ends: soon, with the right status, nothing left behind, the culprit named."""

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
from launching import GONE_S, Run, ends, failure_of, running, saved_step
from omegaconf import OmegaConf
from surroundings import CTRL_C, Terminal
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.compat.proto import event_pb2

from evener.trainer import Result, compose, train
from evener.trainer.config.checks import LaunchPlan
from evener.trainer.launch import launcher


def written_steps(run: Run) -> list[int]:
    """Steps of the points in the run's event file, which must be whole."""
    (file,) = run.folder.glob("logs/*/*/*/events.out.tfevents.*")
    records = list(event_file_loader.RawEventFileLoader(str(file)).Load())
    assert sum(len(record) + 16 for record in records) == file.stat().st_size  # a record has 16 bytes of frame
    events = [event_pb2.Event.FromString(record) for record in records]
    return [event.step for event in events for value in event.summary.value if value.tag == "val/loss"]


def verify_saved(run: Run) -> None:
    """Verify that all ranks have stopped at one step, whose state is saved."""
    last = run.last_steps()
    assert set(last.values()) == {last[0]}
    assert saved_step(run) == last[0] + 1
    assert "Traceback" not in run.output.read_text()


RESTARTS = ("launcher.max_restarts=2",)
ALONE = ("strategy=single_device", "devices=1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "to", "words"),
    [
        ("SIGTERM", "command", ()),
        ("SIGINT", "command", ()),
        ("SIGUSR1", "command", ()),
        ("SIGHUP", "command", ()),
        ("SIGTERM", "rank 1", RESTARTS),
        # `timeout` sends its signal to the command, and then to its group
        ("SIGUSR1", "command and group", RESTARTS),
        ("SIGTERM", "command and group", ALONE),
        pytest.param("SIGTERM", "command and group", (), marks=pytest.mark.slow),
        pytest.param("SIGHUP", "command and group", ("strategy=fsdp",), marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_ranks_at_one_step_with_a_checkpoint(
    signum: str, to: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    number = signal.Signals[signum]
    with running(tmp_path, "++module.pause_s=0.05", *words) as run:
        run.wait_for_step(3, num_ranks=1 if words == ALONE else 2)
        os.kill(run.pid_of(1) if to == "rank 1" else run.process.pid, number)
        if to == "command and group":
            os.killpg(run.process.pid, number)
        assert ends(run, time.monotonic()) == 128 + number, run.output.read_text()
        verify_saved(run)


@pytest.mark.long
def test_a_run_that_is_killed_before_it_could_save_says_so(tmp_path: Path) -> None:
    # it ended with 143 and without a word, as if it had saved
    with running(tmp_path, "++module.fault=hang", "launcher.shutdown_timeout_s=1") as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGTERM)
        assert ends(run, time.monotonic()) == 1
        told = "SIGTERM ended this run.*shutdown_timeout_s=1 s, and nothing of this run was saved"
        assert re.search(told, run.output.read_text()), run.output.read_text()


@pytest.mark.long
@pytest.mark.parametrize("cut", [(), ("strategy=single_device", "devices=1")], ids=["ddp", "single_device"])
def test_a_signal_after_the_last_step_ends_the_run_before_its_test(tmp_path: Path, cut: tuple[str, ...]) -> None:
    late = ("trainer.max_steps=4", "++module.fault=late", "test_after_fit=true")
    with running(tmp_path, *late, *cut) as run:
        assert run.wait(300) == 143, run.output.read_text()
        assert not (tmp_path / "tested").exists()
        assert saved_step(run) == 4


@pytest.mark.long
def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path, "++module.pause_s=0.05") as run:
        run.wait_for_step(1)
        start = time.monotonic()
        os.kill(run.process.pid, signal.SIGKILL)
        assert ends(run, start) == -signal.SIGKILL


FAULTS = {
    "raise": ("KeyError: 'rank 1 had enough'", "in misbehave"),
    # a rank reported exceptions only: after a sys.exit() the others waited for it, and no process ended
    "exit": ("SystemExit: rank 1 has seen enough", "in misbehave"),
    "exit_well": ("SystemExit", "in misbehave"),
    "interrupt": ("KeyboardInterrupt", "in misbehave"),
    "kill": ("it was killed by SIGKILL", ""),
    "abort": ("it was killed by SIGABRT", "Fatal Python error: Aborted"),
    "hang": ("", "rank 1 is at step 3, launched.py"),
}
"""What rank 1 does at step 3: the reason in the result, and what the command shows besides."""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_is_named_and_nothing_that_was_logged_or_saved_is_lost(fault: str, tmp_path: Path) -> None:
    saves = ("checkpoint=every_n_steps", "checkpoint.every_n_steps=2", "logger=tensorboard")
    words = ("strategy.timeout_s=3",) if fault == "hang" else ()
    with running(tmp_path, f"++module.fault={fault}", "trainer.log_every_n_steps=1", *saves, *words) as run:
        run.wait_for_step(3)
        assert ends(run, time.monotonic()) == 1
        output, (reason, told) = run.output.read_text(), FAULTS[fault]
        rank, found = failure_of(run)
        assert found.startswith(reason)
        assert told in output
        assert saved_step(run) == 2
        assert written_steps(run) == [0, 1, 2]
        if fault != "hang":
            assert rank == 1
            assert "rank 1 failed: " in output
            assert "site-packages" not in output.partition("rank 1 failed")[2]
        assert output.count("KeyError: 'rank 1 had enough'") == (fault == "raise")  # not by each rank and the command
        assert "Terminating process" not in output  # a log of torch


@pytest.mark.long
def test_a_rank_that_raises_before_a_restart_is_printed_once(tmp_path: Path) -> None:
    words = (f"++module.once={tmp_path}/once", "launcher.max_restarts=1", "trainer.max_epochs=1")
    with running(tmp_path, "++module.fault=raise", "trainer.limit_train_batches=8", *words) as run:
        assert run.wait(300) == 0, run.output.read_text()
        assert run.output.read_text().count("KeyError: 'rank 1 had enough'") == 1
        (log,) = tmp_path.glob("logs/*/*/*/train.log")
        assert "rank 1 failed: Traceback" in log.read_text()
        assert Result.read(log.parent).status == "finished"


def test_a_rank_that_ends_in_order_because_another_failed_does_not_prevent_the_restart(tmp_path: Path) -> None:
    with running(
        tmp_path, "module._target_=launched.FailsEarly", "++module.fault=raise", f"++module.once={tmp_path}/once",
        "launcher.max_restarts=1", "trainer.max_epochs=1", "trainer.limit_train_batches=2",
    ) as run:  # fmt: skip
        assert run.wait(300) == 0, run.output.read_text()
        assert run.last_steps() == {0: 1, 1: 1}


@pytest.mark.long
def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(tmp_path: Path) -> None:
    with running(
        tmp_path, "++module.fault=kill", f"++module.once={tmp_path}/once", "launcher.max_restarts=1",
        "checkpoint=every_n_steps", "checkpoint.every_n_steps=2", "trainer.max_epochs=1",
    ) as run:  # fmt: skip
        assert run.wait(300) == 0, run.output.read_text()
        steps = [step for rank, _, step in run.lines() if rank == 1]
        assert steps == [0, 1, 2, 3, *range(2, 64)]
        assert len(list(tmp_path.glob("logs/*/*/*/train.log"))) == 1


@pytest.mark.long
def test_workers_start_python_anew_where_they_can_not_be_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "can_fork", lambda _: False)
    words = [f"log_dir={tmp_path}", "strategy=ddp", "devices=2", "accelerator=cpu", "test_after_fit=false"]
    result = train(compose([*words, "trainer.max_epochs=1", "trainer.limit_train_batches=2", "logger=none"]))
    assert result.num_steps == 2
    assert result.num_processes == 2


@pytest.mark.parametrize(("devices", "forks"), [(["cpu", "cpu"], True), (["cuda:0", "cpu"], False)])
def test_what_uses_an_accelerator_is_not_forked(devices: list[str], forks: bool) -> None:
    assert launcher.can_fork(LaunchPlan(tuple(map(torch.device, devices)), 2)) == forks


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ((), 130),
        (RESTARTS, 130),
        (("checkpoint=last",), 129),
        pytest.param(("strategy=fsdp",), 130, marks=pytest.mark.slow),
        pytest.param(("strategy=balanced_ddp",), 130, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_a_terminal_and_one_that_closes_let_the_run_save(
    words: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    # either tells the run and its ranks at once: it is one request
    with (
        Terminal(tmp_path / "output") as terminal,
        running(tmp_path, "++module.pause_s=0.05", *words, terminal=terminal) as run,
    ):
        run.wait_for_step(3)
        if status == 129:
            terminal.close()
        else:
            terminal.press(CTRL_C)
        assert ends(run, time.monotonic()) == status, run.output.read_text()
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


@pytest.mark.long
def test_a_signal_to_a_rank_that_has_trained_and_ends_is_not_a_failure(tmp_path: Path) -> None:
    # the command passes on a signal in both of two ways, and the second one may reach a rank that it has ended
    with running(tmp_path, "++module.fault=at_end", "trainer.max_steps=4") as run:
        assert ends(run, time.monotonic()) == 0, run.output.read_text()
        assert "Traceback" not in run.output.read_text()


def verify_gone(pid: int) -> None:
    since_s = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < since_s + GONE_S, "the worker is alive"
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_a_data_worker_that_hangs_ends_with_its_run_and_its_rank_is_named(killed: bool, tmp_path: Path) -> None:
    with running(tmp_path, "module._target_=launched.Hangs", "strategy.timeout_s=6") as run:
        path, since_s = Path(f"{run.record}.worker"), time.monotonic()
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < since_s + GONE_S, run.output.read_text()
            time.sleep(0.05)
        if killed:
            os.kill(run.process.pid, signal.SIGKILL)
        assert ends(run, time.monotonic()) == (-signal.SIGKILL if killed else 1)
        verify_gone(int(path.read_text()))
        if not killed:
            assert re.search(r"rank 1 is at step 3, .* waiting for a data worker\)", failure_of(run)[1])


LISTENS = "0A"


def listening(pids: set[int]) -> set[str]:
    """Addresses, in hexadecimal as the kernel has them, on which processes listen."""
    sockets = {
        link.readlink().name[8:-1]
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and str(link.readlink()).startswith("socket:[")
    }
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {line[1].partition(":")[0] for line in lines if line[3] == LISTENS and line[9] in sockets}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the sockets of processes from /proc")
def test_the_command_and_its_workers_listen_on_the_loopback_only(tmp_path: Path) -> None:
    with running(tmp_path, "++module.pause_s=0.05") as run:
        run.wait_for_step(2)
        found = listening({run.process.pid, run.pid_of(0), run.pid_of(1)})
    assert found
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}, found


@pytest.mark.long
def test_a_second_command_with_the_same_directory_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    # both wrote the same files; one died with a ValueError, the other ended well
    words = ("strategy=single_device", "devices=1", f"hydra.run.dir={tmp_path}/run", "trainer.max_epochs=1")
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "first", *words, "++module.pause_s=600") as first:
        first.wait_for_step(0, num_ranks=1)
        with running(tmp_path / "second", *words, "seed=12") as second:
            assert second.wait(300) == 1
            told = f"run_dir={tmp_path}/run is in use by process {first.process.pid} on "
            assert told in second.output.read_text()
        first.process.send_signal(signal.SIGKILL)
        first.wait(300)
    with running(tmp_path / "third", *words) as third:
        assert third.wait(300) == 0, third.output.read_text()
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.fixture
def frozen() -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    while not launcher.is_frozen(process.pid):
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process is stopped is read from /proc")
def test_a_frozen_worker_is_killed_where_all_may_be_started_again(frozen: BaseProcess) -> None:
    # the others waited for it as long as for a network, strategy.timeout_s
    options = {"monitor_interval_s": 0.01, "shutdown_timeout_s": 60, "max_restarts": 1}
    workers = launcher.Workers(OmegaConf.create({"launcher": options}), 1, forks=True)
    workers.processes.append(frozen)
    assert workers.join() == 0
    assert frozen.exitcode == -signal.SIGKILL
