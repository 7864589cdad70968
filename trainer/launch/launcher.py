"""Run a job in every process: in this one, in workers that it starts and watches, or as a rank of a launcher.

Workers are started anew after a failure; why a run has failed is reported.
"""

import errno
import faulthandler
import fcntl
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.context import ForkContext, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy
import torch
from omegaconf import DictConfig
from typing_extensions import override

from ...strategies import ConfigError
from ...strategies.core.files import scratch_directory
from ...strategies.distributed import processes, survivors
from ...strategies.distributed.processes import ASK_TO_STOP, RankProcesses, StopRequests
from ...strategies.distributed.store import hosted_store, leave_store
from ...strategies.distributed.survivors import LOOK_S, Board, Survivor
from ..config.checks import LaunchPlan, strategy_name
from ..job.log_file import Interrupted, graceful_stop, loss, report, run_log, tell_stop
from ..job.result import Result, WorkerError, discard_result
from ..job.run import Run, keep_snapshot
from . import cluster
from .cluster import detect_launcher, environment

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
"""The file in a run directory that says who uses it."""

END_S, _FROZEN_S = 10.0, 0.1
"""Seconds that the others have to end after a worker has failed, and between two looks at whether one is frozen."""


def launch(cfg: DictConfig) -> Result:
    """Run the resolved job in as many processes as its strategy needs; with several the result is what rank 0 wrote."""
    started_by = detect_launcher()
    rank = started_by.global_rank() if started_by else 0
    with nullcontext() if rank else locked(Path(cfg.run_dir)):
        plan = LaunchPlan.of(cfg)
        verify_processes(cfg, plan.num_processes, started_by.world_size() if started_by else None)
        if cfg.launcher.get("survive", False):
            verify_survive(cfg, plan, started_by is not None)
        if rank == 0:
            discard_result(cfg.run_dir)
        if started_by:
            if rank == 0:
                cluster.publish(started_by, cfg)
            return Run(cfg, rank, started_by.world_size()).execute()
        if plan.num_processes is None:
            return Run(cfg).execute()
        with run_log(cfg.run_dir):
            try:
                launch_workers(cfg, plan)
                return Result.read(cfg.run_dir)
            finally:
                keep_snapshot(cfg)


@contextmanager
def locked(run_dir: Path) -> Generator[None]:
    """Have the run directory to oneself in the block; the system releases it with the process, however that ends."""
    with (path := run_dir.absolute() / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:  # also of a file system without locks
            if exc.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise ConfigError(
                    f"run_dir={run_dir} is in use by {file.read() or 'another command'}. Wait for its end, or give "
                    "another directory (hydra.run.dir)."
                ) from exc
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def verify_processes(cfg: DictConfig, on_node: int | None, started: int | None) -> None:
    """Refuse another number of processes than the strategy needs: `on_node` on each, None for one without others."""
    num_nodes, needed = cfg.num_nodes, on_node * cfg.num_nodes if on_node else 1
    if started and started != needed:
        raise ConfigError(
            f"The launcher started {started} processes, but the strategy needs {needed} ({on_node or 1} on each of "
            f"{num_nodes} nodes). Change devices and num_nodes, or the number of processes."
        )
    if not started and num_nodes > 1 and on_node is None:
        raise ConfigError(
            f"num_nodes must be 1 for a strategy of one process; got num_nodes={num_nodes}. Set num_nodes=1, or choose "
            "a strategy of several processes, such as strategy=ddp."
        )
    if not started and num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes} needs an external launcher to start processes on other machines. Run on each "
            f"machine: torchrun --nnodes={num_nodes} --nproc-per-node={on_node} train.py ..."
        )


def verify_survive(cfg: DictConfig, plan: LaunchPlan, is_rank: bool) -> None:
    """Refuse `launcher.survive` where ranks can't go on without one that has died."""
    name, batch_size_is = strategy_name(cfg), cfg.strategy.get("batch_size_is", "per_device")
    needed = {"devices_per_process": 1, "shard_optimizer": False, "compression": None, "global_view": "auto"}
    is_apt = name == "balanced_ddp" or (name == "ddp" and batch_size_is == "global")
    if is_rank or not is_apt or not can_fork(plan) or any(cfg.strategy.get(k, v) != v for k, v in needed.items()):
        raise ConfigError(
            "launcher.survive=true needs strategy=ddp with strategy.batch_size_is=global, or balanced_ddp, one device "
            "per process, no shard_optimizer, compression or global_view, and the CPUs of one Linux machine, on which "
            "train.py starts the ranks. Set launcher.survive=false; launcher.max_restarts starts all ranks anew."
        )


def can_fork(plan: LaunchPlan) -> bool:
    """Whether workers may be forked from this process, which has imported everything; else they start Python anew.

    A forked process can't use an accelerator that its parent has touched, and macOS's libraries don't survive a fork.
    """
    return sys.platform == "linux" and all(device.type == "cpu" for device in plan.devices)


def launch_workers(cfg: DictConfig, plan: LaunchPlan) -> None:
    """Start one worker per process, and wait for them, or raise what ended them if that is not their work."""
    assert plan.num_processes is not None
    threads = max(1, (os.cpu_count() or 1) // plan.num_processes)
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as under torchrun
    }
    with environment(variables):
        workers = Workers(cfg, plan.num_processes, can_fork(plan))
        with processes.handled(workers.hear) as workers.requests:
            failed = workers.run()
        if workers.requests.signum is not None:
            raise stopped(workers, cfg, signal.Signals(workers.requests.signum))
        if failed is not None:
            raise explain(workers, cfg, failed)


class Workers(RankProcesses):
    """The workers of a run: the first signal to this process stops them, and Ctrl-C after it ends them at once."""

    def __init__(self, cfg: DictConfig, num_processes: int, forks: bool) -> None:
        super().__init__(cfg.launcher.monitor_interval_s, END_S)
        self.num_processes, self.attempt = num_processes, 0
        self.requests = StopRequests()
        self.ended_at_once = False
        self.in_order: Any = bytes(num_processes)
        """Of each rank of this attempt whether it has ended in order, and not by a signal or `os._exit`."""
        self._cfg, self._forks = cfg, forks
        self._board: Board | None = None
        self._frozen, self._looked_s = set[int](), 0.0

    def run(self) -> int | None:
        """Run all ranks, and anew after a failure if that is allowed; return the one that failed first at last."""
        failed = None
        for attempt in range(self._cfg.launcher.max_restarts + 1):
            self.attempt = attempt
            if attempt > 0 and (told := Result.of_failure(self._cfg.run_dir)):
                sys.stderr.write(f"rank {told.failed_rank} failed: {told.told}\n")
            discard_result(self._cfg.run_dir)  # in which ranks see who was the first to fail
            with hosted_store() as place, scratch_directory() as folder:
                if self._cfg.launcher.get("survive", False):
                    self._board = Board(self.num_processes, folder)
                try:
                    self._start(place)
                    failed = self.join(lambda: self.requests.signum is not None)
                finally:
                    self.end(signal.SIGKILL)
            # one that a signal to it has stopped has stopped the others
            if failed is None or self.requests.signum is not None or is_stop(self.processes[failed].exitcode):
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
                self.in_order = context.RawArray("b", self.num_processes)
                for rank in map(str, range(self.num_processes)):
                    own = {**variables, "RANK": rank, "LOCAL_RANK": rank}
                    process = context.Process(target=run_worker, args=(self._cfg, own, self.in_order, self._board))
                    process.start()
                    self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.requests.signum is not None:
            self.end(self.requests.signum, self._cfg.launcher.shutdown_timeout_s)

    @override
    def _failed(self) -> int | None:
        statuses, board = [process.exitcode for process in self.processes], self._board
        failed = [rank for rank, status in enumerate(statuses) if status]
        if board is not None:  # the others may go on without one that was killed
            failed = [rank for rank in failed if (statuses[rank] or 0) > 0 or not board.lose(rank, statuses)]
        return min(failed, key=lambda rank: self.in_order[rank], default=None)

    @override
    def _wait(self, left: Mapping[int, BaseProcess]) -> None:
        if self._board is None:
            super()._wait(left)
        else:
            time.sleep(min(self._poll_s, LOOK_S))
            self._board.assemble()
        if time.monotonic() - self._looked_s > _FROZEN_S:
            self._kill_frozen(left)

    def _kill_frozen(self, left: Mapping[int, BaseProcess]) -> None:
        """Kill ranks that were stopped (SIGSTOP) at two looks, for which the others wait, if the run goes on then."""
        again, armed = self.attempt < self._cfg.launcher.max_restarts, self._board.armed if self._board else []
        pids = {process.pid for rank, process in left.items() if process.pid and (again or rank in armed)}
        before, self._frozen = self._frozen, set(filter(is_frozen, pids))
        for pid in before & self._frozen:
            os.kill(pid, signal.SIGKILL)
        self._looked_s = time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether the first of the ranks that have not been killed while the others went on has told how it ended."""
        dead = [] if self._board is None else self._board.dead
        return bool(next(told for rank, told in enumerate(self.in_order) if rank not in dead))

    def hear(self, at_once: bool, signum: int, _: FrameType | None) -> None:
        """Pass a signal on."""
        if at_once:
            self.ended_at_once = True
            self.end(signal.SIGKILL)
        else:
            self.end(signum, self._cfg.launcher.shutdown_timeout_s)


def is_frozen(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP); not known where there is no /proc."""
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def is_stop(status: int | None) -> bool:
    """Whether a process has ended in order because a signal asked it to."""
    return status in [128 + signum for signum in ASK_TO_STOP]


def stopped(workers: Workers, cfg: DictConfig, signum: signal.Signals) -> BaseException:
    """Tell how a signal to this process has ended the workers: in order, at once, or too late to save."""
    ended = Interrupted(signum, begun=workers.has_begun)  # it has told the rest
    if workers.ended_at_once and not ended.begun:
        logger.warning("The run was ended at once by a second Ctrl-C, and %s.", loss(cfg.run_dir))
    elif not ended.begun and (workers.processes[0].exitcode or 0) < 0:  # rank 0 was killed
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
    status = process.exitcode or 0
    if is_stop(status):
        return Interrupted(status - 128)
    told = Result.of_failure(cfg.run_dir)
    if told is None or not workers.in_order[rank]:
        how = f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"it exited with status {status}"
        reason = f"{how} (process {process.pid})"
        report(cfg, rank, workers.num_processes, reason, workers.attempt)
        return WorkerError(f"rank {rank} failed: {reason}", rank=rank)
    if told.refused:
        return ConfigError(told.told)
    own = workers.processes[first := told.failed_rank or 0].exitcode or 0  # another's may have been seen first
    return WorkerError(f"rank {first} failed: {told.told}", told.trace, first, own if own > 0 else status)


@contextmanager
def starting(forks: bool) -> Generator[ForkContext | SpawnContext]:
    """Start processes inside the block by what it yields: forked from this one, or with Python anew.

    A new Python does not run the user's script, whose classes can't be named in a configuration.
    """
    if forks:
        with processes.forking():
            yield multiprocessing.get_context("fork")
        return
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        sys.modules["__main__"] = script


def begin() -> None:
    """Make a process that `starting` has started independent of the command's log and signals, but end with it."""
    for signum in ASK_TO_STOP:  # the command passes signals on
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    faulthandler.enable()  # Python's stack on a crash in native code
    processes.die_with_starter()
    logging.getLogger().handlers.clear()  # the command's
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    numpy.random.seed()  # without a seed each process draws its own numbers


def run_worker(cfg: DictConfig, variables: dict[str, str], in_order: Any, board: Board | None) -> None:
    """Run one rank in a process of its own, which ends with the rank's status."""
    os.environ.update(variables)
    begin()
    for signum in ASK_TO_STOP:  # they are blocked until it stops in order, and may come when it has ended
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, frame: None)
    if board is not None:
        survivors.own = Survivor(board, int(os.environ["RANK"]))
    status = exit_status(cfg, in_order)
    if isinstance(multiprocessing.current_process(), SpawnProcess):
        processes.end_process(status)
    leave_store()
    sys.exit(status)


def exit_status(cfg: DictConfig, in_order: Any) -> int:
    """Run one rank; return the status of a script that ends the same way, not 0 if the user's code has ended it."""
    rank, tells = int(os.environ["RANK"]), True
    with graceful_stop():
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)  # blocked while it was started
            Run(cfg, rank, int(os.environ["WORLD_SIZE"])).execute()
        except Interrupted as exc:
            tells = exc.begun or exc.told  # else it had no log yet: the command tells it
            return 128 + exc.signum
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as exc:  # noqa: BLE001  # reported already
            if Result.of_failure(cfg.run_dir) is None:  # the disk is full
                traceback.print_exc()
            return exc.status if isinstance(exc, WorkerError) else 1
        finally:
            in_order[rank] = tells
        return 0
