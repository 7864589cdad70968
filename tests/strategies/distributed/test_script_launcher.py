"""`Trainer(strategy=DDPStrategy(), devices=2)` in a plain script starts processes itself, and ends them in order."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import warm_python
from distributed import run_script, torchrun_env
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from regression import Net, Numbered, quiet_trainer
from tiny import Streamed
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, DDPStrategy
from evener.strategies.distributed import script_launcher
from evener.strategies.distributed.store import verify_started
from evener.trainer import Trainer

SCRIPT = Path(__file__).parents[2] / "support/plain_script.py"


@pytest.mark.long
def test_a_plain_script_runs_once_and_sees_trained_weights(tmp_path: Path) -> None:
    done = warm_python.run(SCRIPT, tmp_path / "log")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0] == "before"
    assert lines[1].split()[2:] == ["3.00", "0.0000"]


AT_STEP = r"plain_script.py:\d+ in"
FAULTS = {
    "fail": (1, "rank 1 of a script"),
    "hang": (1, rf"rank 1 is at step 0, {AT_STEP} training_step"),
    "freeze0": (1, rf"rank 0 is gone; it was at step 3, {AT_STEP} training_step"),
    # after the last collective nobody waited for it but the script, without end
    "linger": (1, rf"rank 1 did not arrive; it was at step 80, {AT_STEP} on_train_end"),
    "busy": (1, "rank 1 was ended by SIGKILL"),  # while rank 0 is at work
    "tarry": (1, "rank 1 did not end within 3 s after the others had"),
    # a data worker that was stuck in its fork held the pipe by which the script waited for the rank
    "orphan": (1, "rank 1 was ended by SIGKILL"),
    # the script ended with "rank 1 exited with status 7", and status 1; on one device both statuses are these
    "interrupt": (1, r"rank 1 has ended the run:\n(.*\n)*.*in training_step\n(.*\n)*KeyboardInterrupt"),
    "exit": (7, r"rank 1 has ended the run:\n(.*\n)*.*in training_step\n(.*\n)*SystemExit: 7"),
}
"""The status of a script, and what it tells, where a rank does something."""


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.slow) if name == "tarry" else name for name in FAULTS]
)
def test_a_rank_that_fails_or_ends_ends_its_script_which_says_why(tmp_path: Path, fault: str) -> None:
    status, told = FAULTS[fault]
    done = warm_python.run(SCRIPT, tmp_path / "log", fault)
    if fault == "orphan":
        child = psutil.Process(int((tmp_path / "log.child").read_text()))
        assert child.status() == psutil.STATUS_SLEEPING
        child.kill()
    assert done.returncode == status
    assert re.search(told, done.stderr), done.stderr
    assert "has ended the run" not in told or "RankError" not in done.stderr
    assert (tmp_path / "log").read_text().splitlines() == ["before"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "to", "status"),
    [
        (signal.SIGTERM, "script", 143),
        pytest.param(signal.SIGTERM, "rank0", 143, marks=pytest.mark.slow),
        (signal.SIGTERM, "rank1", 143),
        (signal.SIGINT, "script", 1),
        (signal.SIGHUP, "group", 129),  # ranks took it from the terminal, and from the script
        pytest.param(signal.SIGUSR1, "rank1", 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_a_script_and_its_ranks_at_one_step(tmp_path: Path, signum: int, to: str, status: int) -> None:
    log = tmp_path / "log"
    script = warm_python.Process(SCRIPT, log, "long", new_session=True)
    try:
        ranks = [wait_for_pid(Path(f"{log}.rank{rank}")) for rank in range(2)]
        os.kill({"script": script.pid, "rank0": ranks[0], "rank1": ranks[1], "group": -script.pid}[to], signum)
        _, errors = script.communicate(timeout=300)
    finally:
        script.kill()
    assert script.returncode == status, errors
    assert log.read_text() == "before\n"
    stopped = [line.split() for line in Path(f"{log}.stopped").read_text().splitlines()]
    assert sorted(int(pid) for pid, _ in stopped) == sorted(ranks)  # and not the script as well
    assert len({step for _, step in stopped}) == 1
    assert int(stopped[0][1]) >= 20
    for rank in ranks:
        wait_for_end(rank)


def wait_for_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and bool(path.read_text()), f"{path.name} was never written")
    return int(path.read_text())


def wait_for_end(pid: int | str) -> None:
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"{pid} is alive")


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


@pytest.mark.slow  # three processes import torch, where forked ones share it
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_guarded_script_whose_processes_import_it_runs_once(method: str, tmp_path: Path) -> None:
    # Each of its 302 tensors took a file descriptor: "Too many open files" (spawn), "too many fds" (forkserver).
    done = warm_python.run(SCRIPT.with_name("guarded_script.py"), tmp_path / "log", method)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text().splitlines() == ["before", "after 3.00 0.0000"]


@pytest.mark.slow
def test_ranks_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    # A rank from a fork server is a child of the server, which lives as long as any of the ranks.
    log = tmp_path / "log"
    script = warm_python.Process(SCRIPT.with_name("guarded_script.py"), log, "forkserver", "sleep")
    try:
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 3, "the ranks did not start")
    finally:
        script.kill()
    for pid in log.read_text().splitlines()[1:]:
        wait_for_end(pid)


@pytest.mark.parametrize(
    ("is_notebook", "device", "given", "found"),
    [
        (True, "cuda", None, "this process has used the GPU already.*Use strategy=dp"),
        (True, "cpu", "spawn", "start_method=spawn was given in a notebook, .* Use start_method=fork"),
        (True, "cpu", None, "fork"),
        (False, "cuda", "fork", "this process has used the GPU already.*without start_method=fork"),
        (False, "cuda", None, "spawn"),
        (False, "cpu", "forkserver", "forkserver"),
    ],
)
def test_what_has_used_its_gpu_does_not_fork(
    is_notebook: bool, device: str, given: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_launcher, "_IS_INTERACTIVE", is_notebook)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=found) if " " in found else nullcontext():
        assert script_launcher.start_method(torch.device(device), given) == found


def test_a_start_method_that_nothing_would_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in torchrun_env(0, 1, 29500).items():
        monkeypatch.setenv(name, value)
    strategy = DDPStrategy(start_method="forkserver")
    with pytest.raises(ConfigError, match=r"start_method=forkserver was given, but train.py, torchrun or the cluster"):
        Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)


@pytest.mark.long
def test_importing_leaves_the_gpu_untouched() -> None:
    code = "import torch; torch.cuda._lazy_init = None; import evener.trainer, evener.strategies"  # not to be called
    done = warm_python.run("-c", code, without_lightning=True)
    assert done.returncode == 0, done.stderr


def _fit_often() -> list[int]:
    """The number of open files after each of three fits."""
    gc.disable()
    found = list[int]()
    for _ in range(3):
        quiet_trainer(DDPStrategy(timeout_s=120), 2, max_epochs=1).fit(Net(), DataLoader(Numbered(4), 2))
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_a_script_that_fits_often_keeps_no_pipe() -> None:
    # Four pipes of each fit's processes stayed open until the cyclic collector ran.
    first, *others = run_script(_fit_often)
    assert others == [first, first]


def _fit_a_part_of_a_stream() -> int:
    popen: Any = popen_fork.Popen
    kill = popen.kill
    popen.kill = lambda process: kill(process) or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    trainer = quiet_trainer(DDPStrategy(timeout_s=120), 2, max_epochs=1, limit_train_batches=2)
    trainer.fit(Net(), DataLoader(Streamed(Numbered(24)), 2, num_workers=2))
    return trainer.global_step


def test_ranks_whose_data_workers_are_at_work_end_in_order() -> None:
    # Python kills those at a process's end. torch took it for a failure of the rank where two had ended at once.
    assert run_script(_fit_a_part_of_a_stream) == 2


SUPPORT = Path(__file__).parents[2] / "support"

ENDING = """
import atexit, os, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from evener.strategies.distributed.processes import end_process

def write(name):
    open(os.path.join(sys.argv[1], name), "w").write("written")

def finish():
    time.sleep(0.3)
    write("thread")

def ask(store):
    while True:
        store.set("key", "value")

store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), multi_tenant=True)
for _ in range(4):
    threading.Thread(target=ask, args=(store.clone(),), daemon=True).start()
threading.Thread(target=finish).start()
atexit.register(write, "atexit")
sys.stdout.write("not flushed")
end_process(3)
"""


@pytest.mark.long
def test_a_process_ends_with_its_status_while_threads_are_in_native_code(tmp_path: Path) -> None:
    # with sys.exit in its place this process aborts (SIGABRT, "terminate called without an active exception")
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "not flushed", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit", "thread"]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process from /proc")
def test_the_groups_threads_end_before_the_interpreter(tmp_path: Path) -> None:
    done = warm_python.run(
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", SUPPORT / "plain_script.py",
        tmp_path / "log", "threads",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        names = (tmp_path / f"log.threads{rank}").read_text().split()
        assert not [name for name in names if "gloo" in name], names


SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "localhost",
}  # fmt: skip
NO_SRUN = r"SLURM_NTASKS=2 is set, .* one of 2, but nobody has started .* Start it with srun; .*unset SLURM_NTASKS"


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"LOCAL_RANK": "0"}, r"LOCAL_RANK=0 is set.*taken for one of 2.*torchrun; .*unset LOCAL_RANK"),
        ({"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, ""),
        (SLURM, NO_SRUN),
        ({**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFB)}, NO_SRUN),
        ({**SLURM, "SLURM_STEP_ID": "0"}, ""),
    ],
)
def test_variables_by_which_a_run_would_wait_for_nobody_are_refused(
    variables: dict[str, str], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment(auto_requeue=False) if "SLURM_NTASKS" in variables else LightningEnvironment()
    environment.set_world_size(2)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        verify_started(environment)
