"""Run a job in every process: in this one, in workers that it starts, or as a rank of an external launcher."""

from contextlib import nullcontext
from pathlib import Path

from omegaconf import DictConfig

from ...strategies import ConfigError
from ..config.checks import LaunchPlan
from ..job.log_file import run_log
from ..job.result import Result, discard_result
from ..job.run import Run
from . import cluster
from .environment import locked
from .workers import launch_workers


def launch(cfg: DictConfig) -> Result:
    """Run the resolved job in as many processes as its strategy needs; with several the result is what rank 0 wrote.

    Raises:
        ConfigError: an option can't be honoured.
        WorkerError: a worker failed, with its rank and traceback.
    """
    started_by = cluster.detect()
    rank = started_by.global_rank() if started_by else 0
    with nullcontext() if rank else locked(Path(cfg.run_dir)):
        plan = LaunchPlan.of(cfg)
        if started_by:
            cluster.verify_size(started_by, plan.num_processes, cfg.num_nodes)
        elif plan.num_processes is None and cfg.num_nodes > 1:
            raise ConfigError(
                f"num_nodes must be 1 for a strategy of one process; got num_nodes={cfg.num_nodes}. Set num_nodes=1, "
                "or choose a strategy of several processes, such as strategy=ddp."
            )
        elif cfg.num_nodes > 1:
            raise ConfigError(
                f"num_nodes={cfg.num_nodes} needs an external launcher to start processes on other machines. Run on "
                f"each machine: torchrun --nnodes={cfg.num_nodes} --nproc-per-node={plan.num_processes} train.py ..."
            )
        if rank == 0:
            discard_result(cfg.run_dir)
        if started_by:
            if rank == 0:
                cluster.publish(started_by, cfg)
            return Run(cfg, rank, started_by.world_size()).execute()
        if plan.num_processes is None:
            return Run(cfg).execute()
        with run_log(cfg.run_dir):
            return launch_workers(cfg, plan)
