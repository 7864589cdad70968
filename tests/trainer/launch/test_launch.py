"""Whatever happens to a launched run, it ends: soon, with the right status, nothing left behind, the culprit named."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import Run, ends, failure_of, running, saved_step
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.compat.proto import event_pb2

from evener.trainer import Result, compose, train
from evener.trainer.config.checks import LaunchPlan
from evener.trainer.launch import launcher

LOGGED = ("logger=tensorboard", "trainer.log_every_n_steps=1")


def written_steps(run: Run) -> list[int]:
    """Steps of the points in the run's event file, which must be whole."""
    (file,) = run.folder.glob("logs/*/*/*/events.out.tfevents.*")
    records = list(event_file_loader.RawEventFileLoader(str(file)).Load())
    assert sum(len(record) + 16 for record in records) == file.stat().st_size  # a record has 16 bytes of frame
    events = [event_pb2.Event.FromString(record) for record in records]
    return [event.step for event in events for value in event.summary.value if value.tag == "val/loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "to_rank", "status"),
    [
        (signal.SIGTERM, None, 143),
        (signal.SIGINT, None, 130),
        (signal.SIGUSR1, None, 138),
        (signal.SIGHUP, None, 129),
        (signal.SIGTERM, 1, 143),
    ],
    ids=["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGTERM to rank 1"],
)
def test_a_signal_stops_all_ranks_at_one_step_with_a_checkpoint(
    tmp_path: Path, signum: int, to_rank: int | None, status: int
) -> None:
    with running(tmp_path, "++module.pause_s=0.05") as run:
        run.wait_for_step(3)
        start = time.monotonic()
        os.kill(run.process.pid if to_rank is None else run.pid_of(to_rank), signum)
        assert ends(run, start) == status, run.output.read_text()
        last = run.last_steps()
        assert last[0] == last[1]
        assert saved_step(run) == last[0] + 1
        assert "Traceback" not in run.output.read_text()


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


@pytest.mark.long
def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path: Path) -> None:
    with running(
        tmp_path, "++module.fault=raise", "checkpoint=every_n_steps", "checkpoint.every_n_steps=2", *LOGGED
    ) as run:
        run.wait_for_step(3)
        assert ends(run, time.monotonic()) == 1
        output = run.output.read_text()
        assert "rank 1 failed" in output
        assert "in misbehave" in output
        assert output.count("KeyError: 'rank 1 had enough'") == 1  # by each rank and the command, 256 lines, it was
        assert "site-packages" not in output.partition("rank 1 failed")[2]
        assert failure_of(run) == (1, "KeyError: 'rank 1 had enough'")
        assert saved_step(run) == 2
        assert written_steps(run) == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("exit", "SystemExit: rank 1 has seen enough"), ("exit_well", "SystemExit"), ("interrupt", "KeyboardInterrupt")],
)
def test_a_rank_that_the_users_code_has_ended_is_named_with_its_traceback(
    tmp_path: Path, fault: str, reason: str
) -> None:
    # Cause: a rank reported exceptions only. After a sys.exit() the others waited for it, and no process ended.
    with running(tmp_path, f"++module.fault={fault}") as run:
        run.wait_for_step(3)
        assert ends(run, time.monotonic()) == 1
        assert "in misbehave" in run.output.read_text().partition("rank 1 failed")[2]
        assert failure_of(run) == (1, reason)


@pytest.mark.long
def test_a_killed_rank_is_named_and_nothing_that_was_logged_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, "++module.fault=kill", *LOGGED) as run:
        run.wait_for_step(3)
        assert ends(run, time.monotonic()) == 1
        assert "rank 1 failed: it was killed by SIGKILL" in run.output.read_text()
        rank, reason = failure_of(run)
        assert rank == 1
        assert reason.startswith("it was killed by SIGKILL")
        assert written_steps(run) == [0, 1, 2]


@pytest.mark.long
def test_a_rank_that_crashes_in_native_code_says_where_it_was(tmp_path: Path) -> None:
    with running(tmp_path, "++module.fault=abort") as run:
        run.wait_for_step(3)
        assert ends(run, time.monotonic()) == 1
        output = run.output.read_text()
        assert "Fatal Python error: Aborted" in output
        assert "in misbehave" in output
        assert "rank 1 failed: it was killed by SIGABRT" in output


@pytest.mark.long
def test_a_rank_that_raises_before_a_restart_is_printed_once(tmp_path: Path) -> None:
    with running(
        tmp_path, "++module.fault=raise", f"++module.once={tmp_path}/once", "launcher.max_restarts=1",
        "trainer.max_epochs=1", "trainer.limit_train_batches=8",
    ) as run:  # fmt: skip
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


def test_a_run_that_fails_in_two_ways_tells_the_last(tmp_path: Path) -> None:
    # Cause: the first attempt's reason was told of a rank that left none in the last one.
    with running(tmp_path, "module._target_=launched.FailsOtherwise", "launcher.max_restarts=1") as run:
        assert run.wait(300) == 1, run.output.read_text()
        assert "rank 1 failed: it exited with status 7" in run.output.read_text().splitlines()[-1]


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
def test_a_hanging_rank_is_gone_soon_after_the_timeout_and_named(tmp_path: Path) -> None:
    with running(tmp_path, "++module.fault=hang", "strategy.timeout_s=3", *LOGGED) as run:
        run.wait_for_step(3)
        assert ends(run, time.monotonic() + 3) == 1
        assert "Terminating process" not in run.output.read_text()  # a log of torch
        assert written_steps(run) == [0, 1, 2]
        assert "rank 1 is at step 3, launched.py" in run.output.read_text()


@pytest.mark.long
def test_workers_on_the_cpu_are_forked_from_the_command(tmp_path: Path) -> None:
    with running(tmp_path, "++module.pause_s=0.05") as run:
        run.wait_for_step(1)
        commands = {Path(f"/proc/{pid}/cmdline").read_text() for pid in (run.process.pid, run.pid_of(0), run.pid_of(1))}
        assert len(commands) == 1


@pytest.mark.long
def test_forked_workers_import_next_to_nothing_themselves(tmp_path: Path) -> None:
    overrides = ("module._target_=launched.Imports", "trainer.max_epochs=1", "logger=tensorboard", "checkpoint=none")
    with running(tmp_path, *overrides, command=["env", sys.executable]) as run:  # a Python that has nothing yet
        assert ends(run, time.monotonic()) == 0, run.output.read_text()
    ranks = Path(f"{run.record}.modules").read_text().splitlines()
    packages = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "fsspec", "evener")
    found = [[name for name in line.split() if name.split(".")[0] in packages] for line in ranks]
    assert len(found) == 2
    assert max(map(len, found)) < 20, found  # a process of its own imports 2,000


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
def test_a_failure_of_those_that_went_on_without_a_rank_is_told(tmp_path: Path) -> None:
    # Cause: the result of the rank that was left out was taken for the first of the same attempt.
    with running(tmp_path, "module._target_=launched.Raises", "launcher.min_processes=1") as run:
        assert run.wait(300) == 1, run.output.read_text()
        assert failure_of(run) == (0, "KeyError: 'rank 0 had enough'")
