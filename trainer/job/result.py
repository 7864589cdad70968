"""What a run returns: metrics, checkpoints, and where everything is."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Result:
    """The outcome of one run, also written as `result.json` in the run directory.

    Args:
        mode: fit, validate, test or predict.
        strategy: name of the strategy.
        devices: the devices of all processes of one node, in order.
        num_processes: processes over all nodes.
        run_dir: directory that holds everything the run wrote.
        metrics: final value of every logged metric, by name; test metrics included after `fit`.
        monitor: name of the monitored metric.
        monitored: its final value; None where it was never logged.
        global_batch: samples of one optimizer step's forward over all processes; None where nothing was trained.
        samples_per_s: training samples per second over all processes, validation time excluded.
        num_steps: optimizer steps taken.
        best_checkpoint: path of the best checkpoint; None where none was kept.
        last_checkpoint: path of the newest checkpoint; None where none was kept.
        predictions: path of the predictions (`torch.load` with `weights_only=True`) after mode=predict.
        peak_memory_mib: largest memory in training of every device of all processes, in MiB; on the CPU the process's.
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
    predictions: str | None = None
    peak_memory_mib: list[float] = field(default_factory=list[float])

    def write(self) -> Path:
        """Write `result.json` into the run directory, whole or not at all.

        Returns:
            The file's path.
        """
        path = Path(self.run_dir) / RESULT_FILE
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return temporary.replace(path)

    @classmethod
    def read(cls, run_dir: str | Path) -> "Result":
        """Read the `result.json` of a run directory.

        Raises:
            FileNotFoundError: the run wrote none, since it did not end.
        """
        return cls(**json.loads((Path(run_dir) / RESULT_FILE).read_text(encoding="utf-8")))


def short_path(path: str | None) -> str:
    """A path relative to the current directory where that is shorter."""
    return min(path, os.path.relpath(path), key=len) if path else ""
