"""Run a job in every process: in this one, under torch's elastic agent, or as a worker of an external launcher."""

from pathlib import Path

from omegaconf import DictConfig
from pytorch_lightning.strategies import ParallelStrategy, Strategy

from ...strategies import ConfigError
from ...strategies.core.device_names import resolve_devices
from ..config.checks import plain, verify_target
from ..job.failure import Failure, report
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
    num_processes = processes_per_node(cfg)
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
        return launch_workers(cfg, num_processes)


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
        except Exception as exc:
            failure = Failure.of(exc, rank)
            if report(cfg, failure, num_processes):
                raise
            raise WorkerError(f"rank {rank} failed too: {failure.reason}", failure.trace) from exc


def processes_per_node(cfg: DictConfig) -> int | None:
    """Return the number of processes that the strategy needs on each node.

    A strategy class may define a class method `count_processes(num_devices, **options) -> int`; other parallel
    strategies of Lightning take one process per device.

    Returns:
        The number, or None for strategies of one process.
    """
    cls = verify_target("strategy", cfg.strategy, Strategy)
    num_devices = len(resolve_devices(plain(cfg.devices), cfg.accelerator))
    options = {key: value for key, value in plain(cfg.strategy).items() if key != "_target_"}
    if count := getattr(cls, "count_processes", None):
        return count(num_devices, **options)
    return num_devices if issubclass(cls, ParallelStrategy) else None
