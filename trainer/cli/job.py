"""Run the jobs of a command: this process's own, or those that rank 0 publishes under a launcher."""

import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from pytorch_lightning.plugins.environments import ClusterEnvironment, TorchElasticEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from ...strategies import ConfigError
from ...strategies.distributed.process_exit import die_with_parent
from ..job.failure import sentence_of, users_frames
from ..job.result import DIVERGED
from ..launch import cluster, membership
from ..launch.environment import WorkerError
from ..launch.launcher import run_rank
from ._summary import show_summary
from .train import ADVISORY_MODES, check, prepare, train


def run_under(started_by: ClusterEnvironment, run_hydra: Callable[[], None]) -> None:
    """Run the command in a rank of a launcher: Hydra on rank 0, and the jobs that it publishes on every other."""
    if isinstance(started_by, TorchElasticEnvironment):
        die_with_parent()  # torch's agent leaves its workers behind when it is killed
    if started_by.global_rank() > 0:
        return follow(started_by)
    try:
        sys.argv[1:] = membership.resolved_words(sys.argv[1:], started_by)
        if run_dir := cluster.earlier_run_dir(started_by):
            sys.argv.append(f"hydra.run.dir={run_dir}")
        run_hydra()
    finally:
        with suppress(ConfigError):  # of the launcher, refused already
            cluster.publish(started_by, None)


def follow(started_by: ClusterEnvironment) -> None:
    """Run the jobs that rank 0 publishes; called on every other rank."""
    try:
        while (cfg := cluster.receive(started_by)) is not None:
            run_rank(cfg, started_by.global_rank(), started_by.world_size())
    finally:
        cluster.leave(started_by)


def run_reported(cfg: DictConfig, wants_traceback: bool) -> float | None:
    """Run one job, and report a user error in one sentence.

    Raises:
        SystemExit: it failed for a reason that a sentence explains; in a sweep Hydra reports which job failed.
    """
    try:
        return run_job(cfg)
    except (ConfigError, WorkerError, MisconfigurationException) as exc:
        if not in_sweep():
            discard_empty(Path(str(cfg.get("run_dir"))), Path(str(cfg.get("log_dir"))))
        if wants_traceback or in_sweep():
            raise
        sys.exit(f"Error: {job_sentence(exc)}")


def check_reported(cfg: DictConfig) -> None:
    """Check a configuration without running it, and report the result in one sentence.

    Raises:
        SystemExit: it has a mistake.
    """
    try:
        checked = check(cfg)
    except ConfigError as exc:
        sys.exit(f"Error: {exc}")
    named = [f"{key}={checked[key].get('_target_')}" for key in ("module", "data", "strategy") if checked.get(key)]
    sys.stdout.write(f"The configuration is valid: {', '.join(named)}, devices={checked.devices}.\n")


def run_job(cfg: DictConfig) -> float | None:
    """Run one job, print its summary table, and return the monitored metric, which Hydra's sweepers optimize.

    Raises:
        SystemExit: the weights contain nan. In a sweep the other jobs go on.
    """
    if cfg.mode in ADVISORY_MODES:
        from ._modes import run_advisory_mode  # slow to import

        run_advisory_mode(prepare(cfg))
        return None
    if cfg.get("hparams_search"):
        from ._search import run_search

        return run_search(cfg)
    result = train(cfg)
    show_summary(result, cfg.log_dir)
    if result.status == DIVERGED and not in_sweep():
        sys.exit(
            "Error: Training diverged: the weights contain nan. Lower the learning rate or set "
            "trainer.gradient_clip_val; trainer.detect_nonfinite=raise stops at the first such step."
        )
    return result.monitored


def discard_empty(run_dir: Path, log_dir: Path) -> None:
    """Remove the directory of a run that never started, which holds only what Hydra wrote, and its empty parents."""
    if [path.name for path in run_dir.glob("*")] != [".hydra"]:
        return
    shutil.rmtree(run_dir / ".hydra")
    above = [run_dir, *run_dir.parents]
    for folder in above[: above.index(log_dir.absolute()) + 1 if log_dir.absolute() in above else 1]:
        with suppress(OSError):  # not empty
            folder.rmdir()


def in_sweep() -> bool:
    """Whether this is a job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def job_sentence(exc: Exception) -> str:
    """Describe a user error of a job in one sentence, and any other exception by the user's frames."""
    if isinstance(exc, WorkerError):
        return str(exc)
    if sentence := sentence_of(exc):
        return sentence
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename} can't be written ({exc.strerror}). Set log_dir to a writable directory."
    return users_frames("".join(traceback.format_exception(exc)))
