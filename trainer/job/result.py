"""Describe the outcome of a run: metrics, checkpoints and paths."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT_FILE = "result.json"

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"

PATIENCE_S = 2.0
"""Seconds that git has to answer; a large repository on a slow disk takes more, and is not described then."""


class WorkerError(RuntimeError):
    """A worker failed; the message contains its rank and the reason.

    Args:
        message: rank, frames of the user's code, and reason.
        trace: the worker's whole traceback; empty if it left none.
        rank: the worker's; None if no worker is at fault.
        status: the exit status of the command.
    """

    def __init__(self, message: str, trace: str = "", rank: int | None = None, status: int = 1) -> None:
        super().__init__(message)
        self.trace = trace
        self.rank = rank
        self.status = status


@dataclass(frozen=True)
class Result:
    """The outcome of one run, also written as `result.json` in the run directory.

    Args:
        mode: fit, validate, test or predict.
        strategy: name of the strategy.
        devices: the devices of all processes of one node, in order.
        num_processes: processes over all nodes.
        run_dir: directory of everything that the run wrote.
        metrics: final value of every logged metric, by name; test metrics included after `fit`.
        monitor: name of the monitored metric.
        monitored: its best value after `fit`, that of the best checkpoint; its final value in the other modes and if no
            checkpoint is ranked by it; None if it was never logged.
        monitored_epoch: the epoch of that best value, from 0; None for a final value.
        global_batch: samples of one optimizer step's forward over all processes; None if nothing was trained.
        samples_per_s: training samples per second over all processes, validation time excluded.
        num_steps: optimizer steps taken.
        best_checkpoint: path of the best checkpoint; None if none was kept.
        last_checkpoint: path of the newest checkpoint; None if none was kept.
        started_from: path of the checkpoint that the run started from; None if the module's weights are its own.
        predictions: path of the predictions (`torch.load` with `weights_only=True`) after mode=predict.
        peak_memory_mib: peak training memory in MiB of every device of all processes; on the CPU of the process.
        status: `finished`; `diverged` if all steps were taken, but the weights contain nan; or `failed`. Of a failed
            run there are the reason, mode, strategy, directory and environment only.
        reason: why the run failed, in one sentence or as the exception's name and text.
        frames: the traceback without the frames of libraries; empty if the reason is a sentence for users.
        trace: all of the traceback.
        failed_rank: the rank that failed first.
        failed_at: local time of the failure.
        num_restarts: restarts of the processes by their launcher before the failure.
        refused: whether it failed since an option or the module can't be honoured.
        environment: what the run started in: `versions`, `host`, `devices` (names of accelerators, or of the
            processor) and `git` (`commit`, and `clean`: whether its files were unchanged), if that is known.
    """

    mode: str
    strategy: str
    devices: list[str]
    num_processes: int
    run_dir: str
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    monitor: str | None = None
    monitored: float | None = None
    monitored_epoch: int | None = None
    global_batch: int | None = None
    samples_per_s: float | None = None
    num_steps: int = 0
    best_checkpoint: str | None = None
    last_checkpoint: str | None = None
    started_from: str | None = None
    predictions: str | None = None
    peak_memory_mib: list[float] = field(default_factory=list[float])
    status: str = FINISHED
    reason: str | None = None
    frames: str = ""
    trace: str = ""
    failed_rank: int | None = None
    failed_at: str | None = None
    num_restarts: int = 0
    refused: bool = False
    environment: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def told(self) -> str:
        """Why the run failed: the frames of the user's code and the reason; without traceback, the reason."""
        return self.frames or str(self.reason)

    def write(self) -> Path:
        """Write `result.json` into the run directory atomically, and return its path."""
        from ...strategies.core.files import replacing  # here, as a command that only reads results needs no torch

        path = Path(self.run_dir) / RESULT_FILE
        with replacing(path) as temporary:
            write_json(self, temporary)
        return path

    def write_first(self) -> bool:
        """Write `result.json`, unless another rank has; return whether this one did."""
        try:
            write_json(self, Path(self.run_dir) / RESULT_FILE, "x")
        except FileExistsError:
            return False
        return True

    @classmethod
    def of_failure(cls, run_dir: str | Path) -> "Result | None":
        """Why a run has failed; None if none of its processes has told."""
        with suppress(OSError, ValueError, TypeError):
            told = cls.read(run_dir)
            return told if told.status == FAILED else None
        return None

    def _repr_html_(self) -> str:
        from .summary import as_html

        return as_html(self)

    @classmethod
    def read(cls, run_dir: str | Path) -> "Result":
        """Read the `result.json` of a run directory.

        Raises:
            FileNotFoundError: the run was killed or stopped by a signal, so it wrote none.
        """
        return cls(**json.loads((Path(run_dir) / RESULT_FILE).read_text(encoding="utf-8")))


def discard_result(run_dir: str | Path) -> None:
    """Remove the result of an earlier run, or of an earlier start of the processes, in the same directory."""
    (Path(run_dir) / RESULT_FILE).unlink(missing_ok=True)


def write_json(outcome: Any, path: Path, mode: str = "w") -> None:
    """Write a dataclass as JSON; `mode` is that of `open`."""
    with path.open(mode, encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome), indent=2) + "\n")


def short_path(path: str | None) -> str:
    """Return a path relative to the current directory if that is shorter."""
    return min(path, os.path.relpath(path), key=len) if path else ""


def environment(devices: Iterable[Any]) -> dict[str, Any]:
    """Versions, host, git commit and the names of devices of this process; for `result.json`."""
    from ...strategies.core.devices import device_model  # here, as a command that only reads results needs no torch

    versions = {name: version(name) for name in ("evener", "torch", "pytorch-lightning")}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "host": platform.node(),
        "devices": [platform.machine() if d.type == "cpu" else device_model(d) for d in devices],
        "git": git_state(),
    }


def git_state() -> dict[str, Any] | None:
    """The commit of the current folder's repository, and whether its files are unchanged; None without one."""
    if not any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        return None
    words = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, changed = done.stdout.strip().partition("-")
    return {"commit": commit, "clean": not changed}
