"""Run a job in every process: in this one, under torch's elastic agent, or as a worker of an external launcher."""

from pathlib import Path

from omegaconf import DictConfig

from ...strategies import ConfigError
from ..config.launch_plan import LaunchPlan
from ..job.failure import Failure, is_stop, report
from ..job.log_file import run_log
from ..job.result import RESULT_FILE, Result
from ..job.run import run
from . import cluster
from .environment import WorkerError


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
    plan = LaunchPlan.of(cfg)
    num_processes = plan.num_processes
    if started_by := cluster.detect():
        cluster.verify_size(started_by, num_processes, cfg.num_nodes)
        if started_by.global_rank() == 0:
            discard_result(cfg)
            cluster.publish(started_by, cfg)
        return run_rank(cfg, started_by.global_rank(), started_by.world_size())
    if num_processes is None:
        if cfg.num_nodes > 1:
            raise ConfigError(
                f"num_nodes must be 1 for a strategy of one process; got num_nodes={cfg.num_nodes}. Set num_nodes=1, "
                "or choose a strategy of several processes, such as strategy=ddp."
            )
        discard_result(cfg)
        return run_rank(cfg)
    if cfg.num_nodes > 1:
        raise ConfigError(
            f"num_nodes={cfg.num_nodes} needs an external launcher to start processes on other machines. "
            f"Run on each machine: torchrun --nnodes={cfg.num_nodes} --nproc-per-node={num_processes} train.py ..."
        )
    from ._elastic import launch_workers  # torch's agent is slow to import, and most runs have one process

    discard_result(cfg)
    with run_log(cfg.run_dir):
        return launch_workers(cfg, plan)


def discard_result(cfg: DictConfig) -> None:
    """Remove the result of an earlier run in the same directory."""
    (Path(cfg.run_dir) / RESULT_FILE).unlink(missing_ok=True)


def run_rank(cfg: DictConfig, rank: int = 0, num_processes: int = 1) -> Result:
    """Run the job in this process, and write to the run's directory why it failed if it does.

    Raises:
        WorkerError: this rank failed after another, whose process prints the reason.
    """
    with run_log(cfg.run_dir, rank):
        try:
            return run(cfg)
        except BaseException as exc:
            if is_stop(exc) or (num_processes == 1 and not isinstance(exc, Exception)):
                raise
            failure = Failure.of(exc, rank)
            if report(cfg, failure, num_processes):
                raise
            raise WorkerError(f"rank {rank} failed too: {failure.reason}", failure.trace) from exc
