"""Describe the outcome of a run: metrics, checkpoints and paths."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULT_FILE = "result.json"

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"


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
        monitored: its final value; None if it was never logged.
        global_batch: samples of one optimizer step's forward over all processes; None if nothing was trained.
        samples_per_s: training samples per second over all processes, validation time excluded.
        num_steps: optimizer steps taken.
        best_checkpoint: path of the best checkpoint; None if none was kept.
        last_checkpoint: path of the newest checkpoint; None if none was kept.
        started_from: path of the checkpoint that the run started from; None if the module's weights are its own.
        predictions: path of the predictions (`torch.load` with `weights_only=True`) after mode=predict.
        peak_memory_mib: peak training memory in MiB of every device of all processes; on the CPU of the process.
        status: `finished`; `diverged` if all steps were taken, but the weights contain nan; or `failed`. Of a failed
            run there are the reason, mode, strategy and directory only.
        reason: why the run failed, in one sentence or as the exception's name and text.
        failed_rank: the rank that failed first.
        failed_at: local time of the failure.
        num_restarts: restarts of the processes by their launcher before the failure.
    """

    mode: str
    strategy: str
    devices: list[str]
    num_processes: int
    run_dir: str
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    monitor: str | None = None
    monitored: float | None = None
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
    failed_rank: int | None = None
    failed_at: str | None = None
    num_restarts: int = 0

    def write(self) -> Path:
        """Write `result.json` into the run directory atomically.

        Returns:
            The file's path.
        """
        from ...strategies.core.files import replacing  # here, as a command that only reads results needs no torch

        path = Path(self.run_dir) / RESULT_FILE
        with replacing(path) as temporary:
            write_json(self, temporary)
        return path

    def write_first(self) -> bool:
        """Write `result.json`, unless another rank of this start of the processes has done so.

        Returns:
            Whether this rank has written it.
        """
        from ...strategies.core.files import temporary_for

        path = Path(self.run_dir) / RESULT_FILE
        temporary = temporary_for(path)
        try:
            write_json(self, temporary)
            path.hardlink_to(temporary)
        except FileExistsError:
            if self.read(self.run_dir).num_restarts == self.num_restarts:
                return False
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    @classmethod
    def read(cls, run_dir: str | Path) -> "Result":
        """Read the `result.json` of a run directory.

        Raises:
            FileNotFoundError: the run was killed or stopped by a signal, so it wrote none.
        """
        return cls(**json.loads((Path(run_dir) / RESULT_FILE).read_text(encoding="utf-8")))


def write_json(outcome: Any, path: Path) -> None:
    """Write a dataclass as JSON."""
    path.write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")


def short_path(path: str | None) -> str:
    """Return a path relative to the current directory if that is shorter."""
    return min(path, os.path.relpath(path), key=len) if path else ""
