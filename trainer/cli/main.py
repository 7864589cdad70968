"""Run the command line: compose the configuration with Hydra, run it, report user errors in one sentence."""

import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from ...strategies import ConfigError
from ..job.failure import sentence_of, users_frames
from ..job.result import DIVERGED
from ..launch import cluster
from ..launch.environment import WorkerError, environment
from ..launch.launcher import run_rank
from ._summary import show_summary
from .sweep_table import show_unfinished
from .train import ADVISORY_MODES, prepare, train

CONFIG_PACKAGE = "pkg://evener.conf"
FULL_ERROR = "HYDRA_FULL_ERROR"


def main(config_dir: str | Path | None = None, config_name: str = "train") -> None:
    """Run the command line of `train.py`.

    Args:
        config_dir: a project's own configuration directory, relative to its script; its root configuration lists
            `pkg://evener.conf` under `hydra.searchpath` to build on the groups here (see `examples/user_project`).
            None uses the configuration of this package.
        config_name: the root configuration.
    """
    script_dir = Path(getattr(sys.modules["__main__"], "__file__", None) or ".").absolute().parent
    config_path = CONFIG_PACKAGE if config_dir is None else str(script_dir / config_dir)
    wants_traceback = os.environ.get(FULL_ERROR, "0") == "1"

    def job(cfg: DictConfig) -> float | None:
        try:
            return run_job(cfg)
        except (ConfigError, WorkerError, MisconfigurationException) as exc:
            if wants_traceback or in_sweep():
                raise  # Hydra reports which job of the sweep failed
            sys.exit(explain(exc))

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a `_target_` next to the configuration is importable, however we were started
    started_by = cluster.detect()
    if started_by is not None and started_by.global_rank() > 0:
        try:
            follow(started_by)
        except Exception as exc:
            if wants_traceback:
                raise
            sys.exit(explain(exc))
        return
    try:
        if started_by is not None and (run_dir := cluster.earlier_run_dir(started_by)):
            sys.argv.append(f"hydra.run.dir={run_dir}")
        with environment({FULL_ERROR: "1"}):  # Hydra re-raises exceptions, which are reported in one sentence here
            hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)(job)()
    except Exception as exc:
        show_unfinished()
        if wants_traceback:
            if isinstance(exc, WorkerError):
                sys.stderr.write(exc.trace)
            raise
        sys.exit(explain(exc))
    except KeyboardInterrupt:  # a second Ctrl-C, while the first one ends the run
        if wants_traceback:
            raise
        sys.exit(128 + signal.SIGINT)
    finally:
        if started_by is not None:
            with suppress(ConfigError):  # refused already
                cluster.publish(started_by, None)


def follow(started_by: ClusterEnvironment) -> None:
    """Run the jobs that rank 0 publishes; called on every other rank."""
    try:
        while (cfg := cluster.receive(started_by)) is not None:
            run_rank(cfg, started_by.global_rank(), started_by.world_size())
    finally:
        cluster.leave(started_by)


def run_job(cfg: DictConfig) -> float | None:
    """Run one job, print its summary table, and return the monitored metric, which Hydra's sweepers optimize.

    Raises:
        SystemExit: the weights contain nan. In a sweep the other jobs go on.
    """
    if cfg.mode in ADVISORY_MODES:
        from ._modes import run_advisory_mode  # slow to import

        run_advisory_mode(prepare(cfg))
        return None
    result = train(cfg)
    show_summary(result, cfg.log_dir)
    if result.status == DIVERGED and not in_sweep():
        sys.exit(
            "Error: Training diverged: the weights contain nan. Lower the learning rate or set "
            "trainer.gradient_clip_val; trainer.detect_nonfinite=raise stops at the first such step."
        )
    return result.monitored


def in_sweep() -> bool:
    """Whether this is a job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def explain(exc: Exception) -> str:
    """Describe a user error in one sentence, and any other exception by the user's frames."""
    if isinstance(exc, WorkerError):
        return f"Error: {exc}"
    if sentence := sentence_of(exc):
        return f"Error: {sentence}"
    if isinstance(exc, MissingConfigException) and exc.options is not None and exc.missing_cfg_file:
        group, _, option = exc.missing_cfg_file.rpartition("/")
        return f"Error: {group}={option} is unknown. Choose one of: {', '.join(sorted(exc.options))}."
    frames = traceback.extract_tb(exc.__traceback__)
    from_hydra = bool(frames) and frames[-1].filename.startswith(str(Path(hydra.__file__).parent))
    if from_hydra or isinstance(exc, (CompactHydraException, OmegaConfBaseException)):
        return f"Error: {composition_sentence(exc)}"
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"Error: {exc.filename} can't be written ({exc.strerror}). Set log_dir to a writable directory."
    return f"Error: {users_frames(''.join(traceback.format_exception(exc)))}"


def composition_sentence(exc: Exception) -> str:
    """Summarize Hydra's error for a configuration that does not compose in one sentence."""
    if str(exc).startswith("Config group override must be"):
        return "A config group can't be null. Choose one of its options, such as logger=none or data=none."
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if isinstance(exc, OverrideParseException):
        return (
            f"{exc.override} can't be parsed ({lines[0]}). Quote values that contain = , {{ }} or [ ], and protect the "
            "quotes from the shell, such as \"name='a=b'\"."
        )
    if lines[0].startswith("Ambiguous value"):
        return f"{lines[0].rstrip('.')}. For a list use brackets, as in key=[a,b]; for a sweep add -m."
    unknown = re.match(r"Could not override '([^']+)'", lines[0])
    if unknown:
        key = unknown[1]
        return f"{key} is unknown: neither a key nor a group. Run --help to list them, or add a new key with +{key}=..."
    return f"{lines[0].rstrip('.')}. Run with --cfg job to print the configuration, or --help to list the groups."
