"""Try one strategy: run a few steps of the user's training in a process of its own, `python -m` of this file.

The results are written to the trial's folder.
"""

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ...strategies import ConfigError
from ...strategies.distributed.process_exit import die_with_parent
from ..config.checks import LaunchPlan, verify_config
from ..job.result import FAILED, RESULT_FILE, Result
from ..launch.environment import AGENT, importable
from ..launch.launcher import launch
from .probe import RankRecord, read_records

CONFIG_FILE, OUTPUT_FILE = "config.yaml", "output.log"
OK, REFUSED = "ok", "refused"


@dataclass(frozen=True)
class Trial:
    """The outcome of one strategy's trial.

    Args:
        status: `ok`; `refused` if it can't train this module on these devices; `failed` if an error occurred.
        reason: why it did not train; empty if it did.
        losses: loss of every global batch; empty if `training_step` returns none.
        global_batch: samples of the first global batch.
        samples_per_s: samples per second over all processes, in the median window.
        spread: half the range of the middle half of the windows' speeds, relative to the median.
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
    spread: float = 0.0
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
    speed, spread = median_rate(records)
    return Trial(
        strategy,
        losses=global_losses(records),
        global_batch=sum(record.first_batch for record in records),
        samples_per_s=speed,
        spread=spread,
        memory={name: size for record in records for name, size in record.memory.items()},
        num_processes=len(records),
        num_batchnorms=records[0].num_batchnorms,
        num_dropouts=records[0].num_dropouts,
        draws=any(record.draws for record in records),
    )


def median_rate(records: list[RankRecord]) -> tuple[float, float]:
    """Samples per second over all ranks in the median window, and their spread; 0 if training was too short."""
    rates = [
        sum(samples for samples, _ in window) / max(seconds for _, seconds in window)
        for window in zip(*(record.windows for record in records), strict=False)
    ]
    if len(rates) < 2:
        return sum(rates), 0.0
    low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
    return median, (high - low) / 2 / median


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
    try:
        verify_config(cfg)
        LaunchPlan.of(cfg)
    except ConfigError as exc:
        return Trial(strategy, REFUSED, str(exc))
    folder = write_config(cfg)
    with (folder / OUTPUT_FILE).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "evener.trainer.study.trial", str(folder / CONFIG_FILE)],
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
    return read_trial(folder, strategy, f"its process ended with status {process.returncode}")


def write_config(cfg: DictConfig) -> Path:
    """Write a trial's configuration into its folder, without what an earlier trial has left there."""
    folder = Path(cfg.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (folder / RESULT_FILE, *folder.glob("rank*.json")):
        file.unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
    return folder


def end(process: subprocess.Popen[bytes], patience_s: float = 8.0) -> None:
    """Terminate a running trial: gracefully, so that it ends its workers, then by force, which ends them too."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_trial(folder: Path, strategy: str, ended: str) -> Trial:
    """Read the results in a trial's folder; `ended` says how it ended if it has left none."""
    try:
        result = Result.read(folder)
    except FileNotFoundError:
        return Trial(strategy, FAILED, f"{ended}; see {folder / OUTPUT_FILE}")
    if result.status == FAILED:
        if result.refused:
            return Trial(strategy, REFUSED, str(result.reason))
        return Trial(strategy, FAILED, f"{result.reason}; see {folder / OUTPUT_FILE}")
    records = read_records(folder)
    return summarize(strategy, records) if records else Trial(strategy, FAILED, "it ran no training step")


def execute(config_file: Path) -> None:
    """Run a trial's configuration in this process and its workers."""
    cfg = OmegaConf.load(config_file)
    assert isinstance(cfg, DictConfig)
    launch(cfg)


if __name__ == "__main__":
    die_with_parent()
    execute(Path(sys.argv[1]))
