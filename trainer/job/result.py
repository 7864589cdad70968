"""Describe the outcome of a run, its metrics, checkpoints and paths, and print it as a table."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

RESULT_FILE = "result.json"

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"

PATIENCE_S = 2.0
"""Seconds that git has to answer; a large repository on a slow disk takes more, and is not described then."""


class WorkerError(RuntimeError):
    """A worker failed; the message contains its rank, the frames of the user's code, and the reason.

    `trace` is its whole traceback, if it left one, and `status` the exit status of the command.
    """

    def __init__(self, message: str, trace: str = "", rank: int | None = None, status: int = 1) -> None:
        super().__init__(message)
        self.trace, self.rank, self.status = trace, rank, status


@dataclass(frozen=True)
class Result:
    """The outcome of one run, also written as `result.json` in the run directory.

    Args:
        devices: the devices of all processes of one node, in order.
        num_processes: processes over all nodes.
        run_dir: directory of everything that the run wrote.
        metrics: final value of every logged metric, by name; test metrics included after `fit`.
        monitored: best value of the metric `monitor` after `fit`, that of the best checkpoint; its final value in the
            other modes and if no checkpoint is ranked by it; None if it was never logged.
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

    def write(self) -> None:
        """Write `result.json` into the run directory atomically."""
        from ...strategies.core.files import replacing  # here, as a command that only reads results needs no torch

        with replacing(Path(self.run_dir) / RESULT_FILE) as temporary:
            write_json(self, temporary)

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
        file.write(f"{json.dumps(asdict(outcome), indent=2)}\n")


def short_path(path: str | None) -> str:
    """Return a path relative to the current directory if that is shorter."""
    return min(path, os.path.relpath(path), key=len) if path else ""


def environment(devices: Iterable[Any]) -> dict[str, Any]:
    """Versions, host, git commit and the names of devices of this process; for `result.json`."""
    from ...strategies.core.devices import device_model  # here, as a command that only reads results needs no torch

    versions, git = {name: version(name) for name in ("evener", "torch", "pytorch-lightning")}, None
    if any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        words = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
            commit, _, changed = done.stdout.strip().partition("-")
            git = {"commit": commit, "clean": not changed}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "host": platform.node(),
        "devices": [platform.machine() if d.type == "cpu" else device_model(d) for d in devices],
        "git": git,
    }


NOT_THEIRS = ("balance/", "device/", "lr-", "speed/")
"""How the names of values begin that the module did not log."""


def summary_rows(result: Result) -> list[tuple[str, str]]:
    """List the rows of the summary table as (label, value); paths are below it."""
    metrics, untrained = result.metrics, result.mode != "fit" and result.started_from is None
    nan = ["the weights"] if result.status == DIVERGED else []
    nan += sorted(name for name, value in metrics.items() if math.isnan(value))
    shares = [f"{value:.0%}" for name, value in metrics.items() if name.startswith("balance/share_")]
    if shares and "balance/efficiency" in metrics:
        shares.append(f"efficiency {metrics['balance/efficiency']:.2f}")
    peaks = [f"{peak:,.0f}" for peak in result.peak_memory_mib]
    rows = [
        ("strategy", result.strategy),
        ("devices", ", ".join(result.devices) + (f", {n} processes" if (n := result.num_processes) > 1 else "")),
        ("global batch", "" if result.global_batch is None else f"{result.global_batch} samples"),
        ("shares", ", ".join(shares)),
        ("speed", "" if result.samples_per_s is None else f"{result.samples_per_s:,.0f} samples/s"),
        ("peak memory", f"{', '.join(peaks if len(set(peaks)) > 1 else peaks[:1])} MiB" if peaks else ""),
        ("weights", "untrained: the module's own; resume=last takes trained ones" if untrained else ""),
        ("nan", ", ".join(nan)),
    ]
    for name in sorted(metrics):
        is_repeated = name.endswith("_epoch") and name.removesuffix("_epoch") in metrics
        if not (is_repeated or name.endswith("_step") or name.startswith(NOT_THEIRS)):
            rows.append((name, f"{metrics[name]:.4f}"))
            if name == result.monitor and result.monitored is not None and result.monitored_epoch is not None:
                best = f"{result.monitored:.4f} in epoch {result.monitored_epoch}, the best"
                rows[-1] = (name, f"{best} (last {metrics[name]:.4f})")
    return [(label, value) for label, value in rows if value]


def show_summary(result: Result, log_dir: str = "logs") -> None:
    """Print the summary table, the paths of the run, and the command that opens TensorBoard."""
    ended = "diverged: its weights contain nan" if result.status == DIVERGED else "finished"
    table = new_table(f"{result.mode} {ended}", ("what", "value"), text=("what",), folded=("value",))
    table.show_header = False
    for label, value in summary_rows(result):
        table.add_row(label, Text(value))
    named = {"started from": result.started_from, "best checkpoint": result.best_checkpoint}
    named |= {"predictions": result.predictions, "run directory": result.run_dir}
    paths = {label: short_path(path) for label, path in named.items() if path}
    width = max(map(len, paths))
    lines = [f"{label:<{width}}  {path}" for label, path in paths.items()]  # a path that is cut can't be pasted
    if any(Path(result.run_dir).glob("events.out.tfevents.*")):
        lines.append(f"tensorboard --logdir {log_dir}")
    print_table(table, lines, width=80)


def new_table(title: str, headings: Iterable[str], text: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """Make a table of numbers, aligned to the right; `text` to the left, `folded` also over several lines."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        left = heading in text or heading in folded
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=heading not in folded)
    return table


def print_table(table: Table | None, lines: Iterable[str] = (), width: int = 120) -> None:
    """Print a table, whole or, with folded columns, in a terminal's width (elsewhere `width`), and unwrapped lines."""
    console = Console()
    if table is not None:
        if all(column.no_wrap for column in table.columns):
            console.width = max(console.width, 200)  # a table is no wider than its cells
        elif not (console.is_terminal or console.is_jupyter):
            console.width = width
        console.print(table)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
