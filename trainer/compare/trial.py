"""Try one strategy: run a few steps of the user's training in a separate process.

The results are written to the trial's folder.
"""

import json
import os
import statistics
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...strategies import ConfigError
from ..config.checks import verify_config
from ..launch.environment import AGENT, importable
from ..launch.launcher import launch
from ._probe import RankRecord, read_records

CONFIG_FILE, OUTCOME_FILE, OUTPUT_FILE = "config.yaml", "outcome.json", "output.log"
OK, REFUSED, FAILED = "ok", "refused", "failed"


@dataclass(frozen=True)
class Trial:
    """The outcome of one strategy's trial.

    Args:
        status: `ok`; `refused` if it can't train this module on these devices; `failed` if an error occurred.
        reason: why it did not train; empty if it did.
        losses: loss of every global batch; empty if `training_step` returns none.
        global_batch: samples of the first global batch.
        samples_per_s: samples per second over all processes.
        memory: peak bytes by device; on the CPU by process.
        num_batchnorms: BatchNorm layers that normalize chunk by chunk.
        num_dropouts: dropout layers with a positive rate.
        draws: whether the training step drew random numbers.
    """

    strategy: str
    status: str = OK
    reason: str = ""
    losses: list[float] = field(default_factory=list[float])
    global_batch: int = 0
    samples_per_s: float = 0.0
    memory: dict[str, int] = field(default_factory=dict[str, int])
    num_processes: int = 1
    num_batchnorms: int = 0
    num_dropouts: int = 0
    draws: bool = False

    @property
    def peak_bytes(self) -> int:
        """Largest peak of all devices, in bytes."""
        return max(self.memory.values(), default=0)


def summarize(strategy: str, records: list[RankRecord]) -> Trial:
    """Combine the records of a run's processes.

    Args:
        records: one per rank.

    Returns:
        The trial; losses are weighted over ranks as the gradients are.
    """
    return Trial(
        strategy,
        losses=global_losses(records),
        global_batch=sum(record.first_batch for record in records),
        samples_per_s=median_rate(records),
        memory={name: size for record in records for name, size in record.memory.items()},
        num_processes=len(records),
        num_batchnorms=records[0].num_batchnorms,
        num_dropouts=records[0].num_dropouts,
        draws=any(record.draws for record in records),
    )


def median_rate(records: list[RankRecord]) -> float:
    """Samples per second over all ranks in the median window; 0 if training was too short for a window."""
    rates = [
        sum(samples for samples, _ in window) / max(seconds for _, seconds in window)
        for window in zip(*(record.windows for record in records), strict=False)
    ]
    return statistics.median(rates) if rates else 0.0


def global_losses(records: list[RankRecord]) -> list[float]:
    """Combine the ranks' losses into those of the global batches: sum(w_r * L_r) / sum(w_r)."""
    combined: list[float] = []
    for losses, weights in zip(
        zip(*(record.losses for record in records), strict=False),
        zip(*(record.weights for record in records), strict=False),
        strict=False,
    ):
        # a rank without samples has zero weight, whatever its loss is
        parts = [weight * loss for loss, weight in zip(losses, weights, strict=True) if weight]
        combined.append(sum(parts) / sum(weights) if parts else 0.0)
    return combined


def run_trial(cfg: DictConfig, strategy: str, timeout_s: float) -> Trial:
    """Run a configuration in a separate process.

    Args:
        cfg: the resolved configuration, with a probe among its callbacks; its `run_dir` is the trial's folder.
        timeout_s: seconds after which the processes are terminated.

    Returns:
        The trial, also if it was refused or failed.
    """
    folder = Path(cfg.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
    (folder / OUTCOME_FILE).unlink(missing_ok=True)
    for file in folder.glob("rank*.json"):
        file.unlink()
    with (folder / OUTPUT_FILE).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "evener.trainer.compare.trial_process", str(folder / CONFIG_FILE)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, AGENT: str(os.getpid()), "PYTHONPATH": importable()},
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Trial(strategy, FAILED, f"it did not finish within compare.timeout_s={timeout_s:g} seconds")
        finally:
            end(process)
    return read_trial(folder, strategy, process.returncode)


def end(process: subprocess.Popen[bytes], patience_s: float = 8.0) -> None:
    """Terminate a running trial: gracefully, so that it ends its workers, then by force, which ends them too."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_trial(folder: Path, strategy: str, returncode: int) -> Trial:
    """Read the results in a trial's folder."""
    outcome = folder / OUTCOME_FILE
    if not outcome.exists():
        return Trial(strategy, FAILED, f"its process ended with status {returncode}; see {folder / OUTPUT_FILE}")
    told: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    records = read_records(folder)
    if told["status"] != OK:
        return Trial(strategy, told["status"], told["reason"])
    if not records:
        return Trial(strategy, FAILED, "it ran no training step: the loader is empty")
    return summarize(strategy, records)


def run_here(config_file: Path) -> dict[str, str]:
    """Run a trial's configuration in this process and its workers.

    Returns:
        `status`, and the `reason` if it is not `ok`.
    """
    cfg = OmegaConf.load(config_file)
    assert isinstance(cfg, DictConfig)
    try:
        verify_config(cfg)
        launch(cfg)
    except ConfigError as exc:
        return {"status": REFUSED, "reason": str(exc)}
    except Exception as exc:  # noqa: BLE001  # whatever a strategy or the user's code raises is this trial's outcome
        traceback.print_exc()
        return {"status": FAILED, "reason": f"{last_line(exc)}; see {config_file.with_name(OUTPUT_FILE)}"}
    return {"status": OK, "reason": ""}


def last_line(exc: Exception) -> str:
    """The most informative line of an error; for a worker, the last line of its traceback."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return text if "Error" in text else f"{type(exc).__name__}: {text}"
