"""Run a job in every process: in this one, in workers that it starts and watches, or as a rank of a launcher.

Workers are started anew after a failure; why a run has failed is reported.
"""

import logging
import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from omegaconf import DictConfig
from typing_extensions import override

from ...strategies import ConfigError
from ...strategies.core.files import scratch_directory
from ...strategies.distributed.process_exit import ASK_TO_STOP, StopRequests, handled
from ...strategies.distributed.processes import Process, RankProcesses, status_of
from ...strategies.distributed.store import hosted_store
from ...strategies.distributed.survivors import Agent, Board
from ..config.checks import LaunchPlan, strategy_name
from ..job.log_file import Interrupted, loss, report, run_log, tell_stop
from ..job.result import Result, WorkerError, discard_result
from ..job.run import Run, keep_snapshot
from . import cluster, worker
from .environment import detect_launcher, environment, locked
from .worker import ENDED_FILE, starting


def launch(cfg: DictConfig) -> Result:
    """Run the resolved job in as many processes as its strategy needs; with several the result is what rank 0 wrote.

    Raises:
        WorkerError: a worker failed, with its rank and traceback.
    """
    started_by = detect_launcher()
    rank = started_by.global_rank() if started_by else 0
    with nullcontext() if rank else locked(Path(cfg.run_dir)):
        plan = LaunchPlan.of(cfg)
        verify_processes(cfg, plan.num_processes, started_by.world_size() if started_by else None)
        if cfg.launcher.get("survive", False):
            verify_survive(cfg, plan, "a cluster's launcher" if started_by else "")
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


def verify_processes(cfg: DictConfig, on_node: int | None, started: int | None) -> None:
    """Refuse another number of processes than the strategy needs: `on_node` on each, None for one without others."""
    num_nodes, needed = cfg.num_nodes, on_node * cfg.num_nodes if on_node else 1
    if started and started != needed:
        raise ConfigError(
            f"The launcher started {started} processes, but the strategy needs {needed} ({on_node or 1} on each of "
            f"{num_nodes} nodes). Change devices and num_nodes, or the number of processes."
        )
    if started or num_nodes == 1:
        return
    if on_node is None:
        raise ConfigError(
            f"num_nodes must be 1 for a strategy of one process; got num_nodes={num_nodes}. Set num_nodes=1, or choose "
            "a strategy of several processes, such as strategy=ddp."
        )
    raise ConfigError(
        f"num_nodes={num_nodes} needs an external launcher to start processes on other machines. Run on each machine: "
        f"torchrun --nnodes={num_nodes} --nproc-per-node={on_node} train.py ..."
    )


def verify_survive(cfg: DictConfig, plan: LaunchPlan, launcher: str) -> None:
    """Refuse `launcher.survive` where ranks can't go on without one that has died; `launcher` has started this one."""
    name, spares = strategy_name(cfg), cfg.get("launcher", {}).get("spares", 0)
    options = {key: value for key, value in cfg.strategy.items() if key in _ALONE and value != _ALONE[key]}
    if name == "ddp" and cfg.strategy.get("batch_size_is", "per_device") != "global":
        options["batch_size_is"] = cfg.strategy.get("batch_size_is", "per_device")
    found = (
        launcher
        or (f"strategy={name}" if name not in ("ddp", "balanced_ddp") else "")
        or ("" if can_fork(plan) else f"devices={', '.join(sorted({device.type for device in plan.devices}))}")
        or next((f"strategy.{key}={value}" for key, value in options.items()), "")
    )
    if spares:
        raise ConfigError(f"launcher.spares={spares} is no longer there. Leave it out: the remaining ranks go on.")
    if found:
        raise ConfigError(
            "launcher.survive=true needs strategy=ddp with strategy.batch_size_is=global, or balanced_ddp, on the CPUs "
            f"of one Linux machine, started by train.py; got {found}. Set launcher.survive=false; "
            "launcher.max_restarts starts all ranks anew."
        )


_ALONE = {"devices_per_process": 1, "shard_optimizer": False, "compression": None, "global_view": "auto"}
"""Options of strategies with which ranks go on without one that has died."""

logger = logging.getLogger(__name__)

END_S = 30.0
"""Seconds that the others have to end after a worker has failed."""


def launch_workers(cfg: DictConfig, plan: LaunchPlan) -> Result:
    """Start one worker per process, and wait for the result.

    Raises:
        WorkerError: a worker failed, `launcher.max_restarts` times more than allowed.
    """
    assert plan.num_processes is not None
    try:
        run_workers(cfg, plan.num_processes, can_fork(plan))
        return Result.read(cfg.run_dir)
    finally:
        keep_snapshot(cfg)


def can_fork(plan: LaunchPlan) -> bool:
    """Whether workers may be forked from this process, which has imported everything; else they start Python anew.

    A forked process can't use an accelerator that its parent has touched, and macOS's libraries don't survive a fork.
    """
    return sys.platform == "linux" and all(device.type == "cpu" for device in plan.devices)


def run_workers(cfg: DictConfig, num_processes: int, forks: bool) -> None:
    """Run the workers, or raise what ended them if that is not their work."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as under torchrun
    }
    with scratch_directory() as scratch, environment(variables):
        workers = Workers(cfg, num_processes, scratch, forks)
        with handled(workers.hear) as workers.requests:
            failed = workers.run()
        if workers.requests.signum is not None:
            raise stopped(workers, cfg, signal.Signals(workers.requests.signum))
        if failed is not None:
            raise explain(workers, cfg, failed)


class Workers(RankProcesses):
    """The workers of a run: the first signal to this process stops them, and Ctrl-C after it ends them at once.

    Args:
        scratch: a directory for what they leave, in a `folder` for each `attempt` to start all, from 0.
        forks: whether they are forked from this process.
    """

    def __init__(self, cfg: DictConfig, num_processes: int, scratch: Path, forks: bool) -> None:
        super().__init__(cfg.launcher.monitor_interval_s, END_S)
        self.num_processes, self.folder, self.attempt = num_processes, scratch, 0
        self.requests = StopRequests()
        self.ended_at_once = False
        self._cfg, self._scratch, self._forks = cfg, scratch, forks
        self._agent: Agent | None = None

    def run(self) -> int | None:
        """Run all ranks, and anew after a failure if that is allowed; return the one that failed first at last."""
        failed = None
        for attempt in range(self._cfg.launcher.max_restarts + 1):
            self.attempt = attempt
            if attempt > 0 and (told := Result.of_failure(self._cfg.run_dir)):
                sys.stderr.write(f"rank {told.failed_rank} failed: {told.told}\n")
            discard_result(self._cfg.run_dir)  # in which ranks see who was the first to fail
            self.folder = self._scratch / str(attempt)
            self.folder.mkdir()
            with hosted_store() as place:
                if self._cfg.launcher.get("survive", False):
                    self._agent = Agent(Board(self.num_processes))
                try:
                    self._start(place)
                    failed = self.join(lambda: self.requests.signum is not None)
                finally:
                    self.end(signal.SIGKILL)
                    if self._agent is not None:
                        self._agent.board.close()
            # one that a signal to it has stopped has stopped the others
            if failed is None or self.requests.signum is not None or is_stop(status_of(self.processes[failed])):
                break
        return failed

    def _start(self, place: Mapping[str, str]) -> None:
        ranks = {
            "WORLD_SIZE": self.num_processes, "LOCAL_WORLD_SIZE": self.num_processes, "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": os.getpid(), "TORCHELASTIC_RESTART_COUNT": self.attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._cfg.launcher.max_restarts,
        }  # fmt: skip
        variables = {**place, **{name: str(value) for name, value in ranks.items()}}
        self.processes, self._deadline_s = [], math.inf
        # one that reaches a worker while it is forked would raise in a callback of the fork, and be lost
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
        try:
            with starting(self._forks) as context:
                for rank in map(str, range(self.num_processes)):
                    own = {**variables, "RANK": rank, "LOCAL_RANK": rank}
                    arguments = (self._cfg, self.folder, own, None if self._agent is None else self._agent.board)
                    process = context.Process(target=worker.run, args=arguments)
                    process.start()
                    self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.requests.signum is not None:
            self.end(self.requests.signum, self._cfg.launcher.shutdown_timeout_s)

    @override
    def _failed(self) -> int | None:
        statuses, agent = [status_of(process) for process in self.processes], self._agent
        failed = [rank for rank, status in enumerate(statuses) if status]
        if agent is not None:  # the others may go on without one that was killed
            failed = [rank for rank in failed if (statuses[rank] or 0) > 0 or not agent.lose(rank, statuses)]
        return min(failed, key=self.has_ended, default=None)

    @override
    def _can_lose(self, rank: int) -> bool:
        again = self.attempt < self._cfg.launcher.max_restarts
        return again or (self._agent is not None and self._agent.can_lose(rank))

    @override
    def _wait(self, left: Mapping[int, Process]) -> None:
        if self._agent is None:
            super()._wait(left)
        else:
            pids = {rank: process.pid for rank, process in left.items() if process.pid is not None}
            self._agent.wait(pids, self._poll_s)

    @property
    def first(self) -> int:
        """The first of the ranks that have not been killed while the others went on."""
        dead = [] if self._agent is None else self._agent.dead
        return next(rank for rank in range(self.num_processes) if rank not in dead)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has ended in order, and not by a signal or `os._exit`."""
        return (self.folder / ENDED_FILE.format(rank)).exists()

    def hear(self, at_once: bool, signum: int, _: FrameType | None) -> None:
        """Pass a signal on."""
        if at_once:
            self.ended_at_once = True
            self.end(signal.SIGKILL)
        else:
            self.end(signum, self._cfg.launcher.shutdown_timeout_s)


def is_stop(status: int | None) -> bool:
    """Whether a process has ended in order because a signal asked it to."""
    return status in [128 + signum for signum in ASK_TO_STOP]


def stopped(workers: Workers, cfg: DictConfig, signum: signal.Signals) -> BaseException:
    """Tell how a signal to this process has ended the workers: in order, at once, or too late to save."""
    ended = Interrupted(signum, begun=workers.has_ended(workers.first))  # it has told the rest
    if workers.ended_at_once and not ended.begun:
        logger.warning("The run was ended at once by a second Ctrl-C, and %s.", loss(cfg.run_dir))
    elif not ended.begun and (status_of(workers.processes[0]) or 0) < 0:  # rank 0 was killed
        reason = (
            f"{signum.name} ended this run: a step, a batch of validation or the writing of a checkpoint took longer "
            f"than launcher.shutdown_timeout_s={cfg.launcher.shutdown_timeout_s:g} s, and {loss(cfg.run_dir)}. Give "
            "more seconds."
        )
        report(cfg, 0, workers.num_processes, reason, workers.attempt)
        return WorkerError(reason)
    else:
        tell_stop(ended)
    return ended


def explain(workers: Workers, cfg: DictConfig, rank: int) -> BaseException:
    """Tell why a rank has failed: a ConfigError, or rank and reason of the first failure that was reported."""
    process = workers.processes[rank]
    status = status_of(process) or 0
    if is_stop(status):
        return Interrupted(status - 128)
    told = Result.of_failure(cfg.run_dir)
    if told is None or not workers.has_ended(rank):
        how = f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"it exited with status {status}"
        reason = f"{how} (process {process.pid})"
        report(cfg, rank, workers.num_processes, reason, workers.attempt)
        return WorkerError(f"rank {rank} failed: {reason}", rank=rank)
    if told.refused:
        return ConfigError(told.told)
    own = status_of(workers.processes[first := told.failed_rank or 0]) or 0  # another's may have been seen first
    return WorkerError(f"rank {first} failed: {told.told}", told.trace, first, own if own > 0 else status)
