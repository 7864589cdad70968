"""Try one strategy: run a few steps of the user's training in a process of its own, `python -m` of this file.

The run leaves its result, and what the probe has measured, in the trial's folder.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ...strategies import ConfigError
from ...strategies.distributed.process_exit import die_with_parent
from ..config.checks import LaunchPlan, verify_config
from ..job.result import FAILED, Result, discard_result
from ..launch.environment import PARENT, importable
from ..launch.launcher import launch
from .probe import PROBE_FILE

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
        peak_memory_mib: peak memory of every device of all processes; on the CPU of the process.
        excuses: known reasons for which its losses may differ from another strategy's.
    """

    strategy: str
    status: str = OK
    reason: str = ""
    losses: list[float] = field(default_factory=list[float])
    global_batch: int = 0
    samples_per_s: float = 0.0
    spread: float = 0.0
    peak_memory_mib: list[float] = field(default_factory=list[float])
    num_processes: int = 1
    excuses: list[str] = field(default_factory=list[str])

    @property
    def peak_mib(self) -> float:
        """Largest peak of all devices, in MiB."""
        return max(self.peak_memory_mib, default=0.0)

    @classmethod
    def read(cls, folder: Path, strategy: str, ended: str) -> "Trial":
        """Read the outcome from a trial's folder; `ended` says how it ended if it has left none."""
        try:
            result = Result.read(folder)
        except FileNotFoundError:
            return cls(strategy, FAILED, f"{ended}; see {folder / OUTPUT_FILE}")
        if result.status == FAILED:
            if result.refused:
                return cls(strategy, REFUSED, str(result.reason))
            return cls(strategy, FAILED, f"{result.reason}; see {folder / OUTPUT_FILE}")
        if result.global_batch is None:
            return cls(strategy, FAILED, "it ran no training step")
        return cls(
            strategy,
            global_batch=result.global_batch,
            peak_memory_mib=result.peak_memory_mib,
            num_processes=result.num_processes,
            **json.loads((folder / PROBE_FILE).read_text(encoding="utf-8")),
        )


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
            env={**os.environ, PARENT: str(os.getpid()), "PYTHONPATH": importable()},
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Trial(strategy, FAILED, f"it did not finish within compare.timeout_s={timeout_s:g} seconds")
        finally:
            end(process)
    return Trial.read(folder, strategy, f"its process ended with status {process.returncode}")


def write_config(cfg: DictConfig) -> Path:
    """Write a trial's configuration into its folder, without the result of an earlier trial there."""
    folder = Path(cfg.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    discard_result(folder)
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


def execute(config_file: Path) -> None:
    """Run a trial's configuration in this process and its workers."""
    cfg = OmegaConf.load(config_file)
    assert isinstance(cfg, DictConfig)
    launch(cfg)


if __name__ == "__main__":
    die_with_parent()
    execute(Path(sys.argv[1]))
