"""Start `train.py` in a process of its own, watch it, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import warm_python
from omegaconf import DictConfig
from surroundings import Terminal

from evener.trainer import Result, compose
from evener.trainer.checkpoint.file_io import find_newest

ROOT = Path(__file__).parents[2]

GONE_S = 120.0
"""Seconds within which every process of a run must be gone. Ten are promised; on two idle cores it takes 1.2 s after an
exception, 1.9 s after a kill, and 4 s after a timeout, and on a busy machine many times as long."""


def words_of(folder: Path) -> list[str]:
    """What a run is told that trains a module of `launched.py`, and writes to a folder."""
    return [
        "accelerator=cpu", f"log_dir={folder}/logs", "data=none", "module._target_=launched.Told",
        f"+module.record={folder}/record", "test_after_fit=false", "callbacks=none",
    ]  # fmt: skip


def configured(folder: Path, *overrides: str) -> DictConfig:
    """The configuration of such a run of one epoch on one device, for the tests that train in their own process."""
    short = ["strategy=single_device", "devices=1", "logger=none", "trainer.enable_model_summary=false"]
    return compose([*words_of(folder), *short, "trainer.max_epochs=1", *overrides])


class Run:
    """A running `train.py strategy=ddp devices=2` on the module of `launched.py`.

    Args:
        folder: for everything that it writes.
        overrides: further words of the command line.
        command: what runs `train.py`; python by default, torchrun where that is tested.
        env: further environment variables.
        terminal: what controls it; its output goes there.
    """

    def __init__(
        self, folder: Path, overrides: list[str], command: list[str] | None = None, env: dict[str, str] | None = None,
        terminal: Terminal | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.record = folder / "record"
        self.output = folder / "output"
        given = (*words_of(folder), "strategy=ddp", "devices=2", "trainer.max_epochs=3", *overrides)
        words = [str(ROOT / "train.py"), *given]
        if not any(word.startswith("logger=") for word in overrides):
            words.append("logger=none")
        paths = os.pathsep.join([str(ROOT / "tests/support"), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        self.process: warm_python.Process | subprocess.Popen[bytes]
        python, *before = command or [sys.executable]
        if python == sys.executable:
            output = self.output if terminal is None else terminal.path
            self.process = warm_python.Process(
                *before, *words, cwd=folder, env=variables, output=output, new_session=True
            )
            return
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [python, *before, *words], stdout=file, stderr=file, env=variables, cwd=folder, start_new_session=True
            )

    def lines(self) -> list[tuple[int, int, int]]:
        """(rank, pid, step) of every step begun so far."""
        text = self.record.read_text() if self.record.exists() else ""
        return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in text.splitlines())]

    def wait_for_step(self, step: int, timeout_s: float = 300, num_ranks: int = 2) -> None:
        """Wait until all ranks have begun a step."""
        deadline = time.monotonic() + timeout_s
        while len({rank for rank, _, begun in self.lines() if begun >= step}) < num_ranks:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def pid_of(self, rank: int) -> int:
        """The newest process of a rank."""
        return [pid for number, pid, _ in self.lines() if number == rank][-1]

    def wait(self, timeout_s: float) -> int:
        """Wait for the end.

        Returns:
            The exit status, negative for a signal.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output.read_text()}") from None

    def survivors(self) -> list[int]:
        """Processes of this run that are alive, found by a file name that only they have on their command line."""
        pids = {pid for _, pid, _ in self.lines()}
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]

    def last_steps(self) -> dict[int, int]:
        """The last step begun by each rank."""
        return {rank: step for rank, _, step in self.lines()}


@contextmanager
def running(
    folder: Path, *overrides: str, command: list[str] | None = None, env: dict[str, str] | None = None,
    terminal: Terminal | None = None,
) -> Generator[Run]:  # fmt: skip
    """Start a run, and end its processes whatever happens."""
    run = Run(folder, list(overrides), command, env, terminal)
    try:
        yield run
    finally:
        for pid in {run.process.pid, *(pid for _, pid, _ in run.lines())}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.process.wait()


def ends(run: Run, since_s: float) -> int:
    """Wait for the end of a run and of all its processes, which must come in time; return its status."""
    status = run.wait(since_s + GONE_S - time.monotonic())
    while run.survivors():
        assert time.monotonic() - since_s < GONE_S, f"survivors: {run.survivors()}"
        time.sleep(0.05)
    return status


def failure_of(run: Run) -> tuple[int | None, str]:
    """Rank and reason in the run's result, which must be in its log, too."""
    (log,) = run.folder.glob("logs/*/*/*/train.log")
    result = Result.read(log.parent)
    assert result.status == "failed"
    assert result.reason is not None
    assert f"rank {result.failed_rank} failed: " in log.read_text()
    assert result.reason in log.read_text()
    return result.failed_rank, result.reason


def saved_step(run: Run) -> int:
    path = find_newest(run.folder)
    assert path is not None
    return torch.load(path, weights_only=True)["global_step"]
