"""Run a job in every process: in this one, in workers that it starts, or as a rank of an external launcher."""

from pathlib import Path

from omegaconf import DictConfig
from pytorch_lightning.plugins.environments import ClusterEnvironment

from ...strategies import ConfigError
from ..config.checks import LaunchPlan
from ..job.log_file import run_log
from ..job.result import RESULT_FILE, Result
from ..job.run import Run
from . import cluster
from .run_lock import locked
from .workers import launch_workers


def launch(cfg: DictConfig) -> Result:
    """Run the configured job in as many processes as its strategy needs.

    Args:
        cfg: the resolved configuration; `run_dir` exists.

    Returns:
        The result. With several processes it is what rank 0 wrote.

    Raises:
        ConfigError: an option can't be honoured.
        WorkerError: a worker failed, with its rank and traceback.
    """
    started_by = cluster.detect()
    if started_by and started_by.global_rank() > 0:
        return _launch(cfg, started_by)
    with locked(Path(cfg.run_dir)):
        return _launch(cfg, started_by)


def _launch(cfg: DictConfig, started_by: ClusterEnvironment | None) -> Result:
    plan = LaunchPlan.of(cfg)
    num_processes = plan.num_processes
    if started_by:
        cluster.verify_size(started_by, num_processes, cfg.num_nodes)
        if started_by.global_rank() == 0:
            discard_result(cfg)
            cluster.publish(started_by, cfg)
        return Run(cfg, started_by.global_rank(), started_by.world_size()).execute()
    if num_processes is None:
        if cfg.num_nodes > 1:
            raise ConfigError(
                f"num_nodes must be 1 for a strategy of one process; got num_nodes={cfg.num_nodes}. Set num_nodes=1, "
                "or choose a strategy of several processes, such as strategy=ddp."
            )
        discard_result(cfg)
        return Run(cfg).execute()
    if cfg.num_nodes > 1:
        raise ConfigError(
            f"num_nodes={cfg.num_nodes} needs an external launcher to start processes on other machines. "
            f"Run on each machine: torchrun --nnodes={cfg.num_nodes} --nproc-per-node={num_processes} train.py ..."
        )
    discard_result(cfg)
    with run_log(cfg.run_dir):
        return launch_workers(cfg, plan)


def discard_result(cfg: DictConfig) -> None:
    """Remove the result of an earlier run in the same directory, and what one that was killed had of it."""
    for path in (Path(cfg.run_dir) / RESULT_FILE, *Path(cfg.run_dir).glob(f".{RESULT_FILE}.*.tmp")):
        path.unlink(missing_ok=True)
