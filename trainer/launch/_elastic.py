"""Start the workers of one machine with torch's elastic agent, and report their failures."""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

from ...strategies import ConfigError
from ...strategies.core.files import scratch_directory
from ...strategies.core.patching import replaced
from ...strategies.distributed.process_exit import ASK_TO_STOP, StopRequests, forking, kill_frozen
from ...strategies.distributed.store import loopback_device
from ..config.checks import AUTO, LaunchPlan
from ..job.failure import Failure, report_killed
from ..job.result import Result, WorkerError
from ..job.run import keep_snapshot
from ..job.signals import Interrupted, loss, tell_stop
from . import worker
from ._rendezvous import options as rendezvous
from .environment import AGENT, FAILURE_FILE, RUNNING_FILE, STOPPED_FILE, environment, importable
from .worker import run_forked

logger = logging.getLogger(__name__)

AGENT_SIGNALS = (*ASK_TO_STOP, signal.SIGQUIT)
"""Signals that end a run."""


def launch_workers(cfg: DictConfig, plan: LaunchPlan) -> Result:
    """Start one worker per process, and wait for the result; without a device that fails for good, if that is allowed.

    Args:
        plan: of a strategy of several processes.

    Raises:
        WorkerError: a worker failed, `launcher.max_restarts` times more than allowed, and none can be left out.
    """
    while True:
        num_processes = plan.num_processes
        assert num_processes is not None
        try:
            return _launch(cfg, num_processes, can_fork(plan))
        except WorkerError as exc:
            least = cfg.launcher.min_processes
            if exc.rank is None or least is None or num_processes <= least:
                raise
            cfg = without_rank(cfg, exc.rank, plan.devices, len(plan.devices) // num_processes)
            plan = LaunchPlan.of(cfg)
            logger.warning(
                "rank %d failed for good (%s): going on with %d processes, devices=%s.",
                exc.rank, exc, plan.num_processes, cfg.devices,
            )  # fmt: skip
        finally:
            keep_snapshot(cfg)


def without_rank(cfg: DictConfig, rank: int, devices: Sequence[torch.device], each: int) -> DictConfig:
    """Return the configuration with which the other ranks, of `each` devices, go on from the newest checkpoint."""
    left = [*devices[: rank * each], *devices[(rank + 1) * each :]]
    given = len(left) if all(device.type == "cpu" for device in left) else [device.index for device in left]
    changes = OmegaConf.create({"devices": given, "resume": AUTO})
    merged = OmegaConf.merge(cfg, changes, {"trainer": {"devices": given}} if "devices" in cfg.trainer else {})
    assert isinstance(merged, DictConfig)
    return merged


def _launch(cfg: DictConfig, num_processes: int, forks: bool) -> Result:
    """Start one worker per process with torch's elastic agent, and wait for the result."""
    with scratch_directory() as scratch, environment(worker_environment(num_processes)):
        config = launch_config(cfg, num_processes, scratch)
        workers = Workers(cfg.launcher.shutdown_timeout_s, scratch / STOPPED_FILE)
        try:
            with workers.started_by_agent(), signal_handlers_kept() as handlers:
                if forks:
                    agents_logs = map(logging.getLogger, (elastic_processes.__name__, ProcessContext.__module__))
                    with ExitStack() as stack:
                        for log in agents_logs:  # a failure is told below
                            stack.enter_context(replaced(log, "disabled", True))
                        stack.enter_context(forking())
                        elastic_launch(config, entrypoint=run_forked)(cfg, scratch, handlers)
                else:
                    config_file = scratch / "config.yaml"
                    config_file.write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
                    elastic_launch(config, entrypoint=sys.executable)("-m", worker.__name__, str(config_file))
        except ChildFailedError as exc:
            raise explain(cfg, exc, num_processes, scratch) from None
        except SignalException as exc:
            raise stopped(cfg, exc.sigval, workers.ended_at_once, num_processes, scratch) from None
    return Result.read(cfg.run_dir)


def can_fork(plan: LaunchPlan) -> bool:
    """Whether workers may be forked from this process, which has imported everything; else they start Python anew.

    A forked process can't use an accelerator that its parent has touched, and macOS's libraries don't survive a fork.
    """
    return sys.platform == "linux" and all(device.type == "cpu" for device in plan.devices)


def stopped(cfg: DictConfig, signum: signal.Signals, at_once: bool, num_processes: int, scratch: Path) -> BaseException:
    """Tell how a signal to this process has ended the workers: in order, at once, or too late to save."""
    ended = Interrupted(signum, begun=(scratch / STOPPED_FILE).exists())
    if at_once and not ended.begun:
        logger.warning("The run was ended at once by a second Ctrl-C, and %s.", loss(cfg.run_dir))
    elif (scratch / RUNNING_FILE).exists():  # rank 0 was killed
        reason = (
            f"{signum.name} ended this run: a step, a batch of validation or the writing of a checkpoint took longer "
            f"than launcher.shutdown_timeout_s={cfg.launcher.shutdown_timeout_s:g} s, and {loss(cfg.run_dir)}. Give "
            "more seconds."
        )
        report_killed(cfg, Failure(0, reason), num_processes)
        return WorkerError(reason)
    else:
        tell_stop(ended)
    return ended


def launch_config(cfg: DictConfig, num_processes: int, scratch: Path) -> LaunchConfig:
    """Configure the elastic agent for one node; its workers meet on the loopback, at a port that the system picks."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        start_method="fork",  # of workers that are a function
        # what is ignored stays so: SIGHUP under nohup
        signals_to_handle=",".join(s.name for s in AGENT_SIGNALS if signal.getsignal(s) != signal.SIG_IGN),
        **rendezvous(scratch / STOPPED_FILE),
        max_restarts=cfg.launcher.max_restarts,
        monitor_interval=cfg.launcher.monitor_interval_s,
        shutdown_timeout=cfg.launcher.shutdown_timeout_s,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
    )


def worker_environment(num_processes: int) -> dict[str, str]:
    """Environment variables of the workers, in addition to the agent's."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    return {
        **loopback_device(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        AGENT: str(os.getpid()),
        "PYTHONPATH": importable(),
    }


@contextmanager
def signal_handlers_kept() -> Generator[dict[int, Any]]:
    """Restore this process's signal handlers afterwards: the agent does not remove its own.

    Yields:
        The handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {int(number): signal.getsignal(number) for number in AGENT_SIGNALS}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Workers:
    """The workers of torch's agent: the first signal to this process stops them, and Ctrl-C after it ends them at once.

    Args:
        timeout_s: seconds that they have to stop.
        stopped: the file that says that a signal has stopped them.

    Attributes:
        ended_at_once: whether they were.
    """

    def __init__(self, timeout_s: float, stopped: Path) -> None:
        self.ended_at_once = False
        self._timeout_s = timeout_s
        self._stopped = stopped
        self._requests = StopRequests()
        self._agent = os.getpid()
        self._context: PContext | None = None
        self._is_starting = False

    def _hear(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._agent:  # a worker, until it has handlers of its own
            raise Interrupted(signum, begun=False)
        answer = self._requests.receive(signum)
        if answer == "at once" and self._context is not None:
            self.ended_at_once = True
            for pid in self._context.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif answer == "first" and not self._is_starting:  # else once all are there
            self._stop()

    def _stop(self) -> None:
        """Have the agent send the first signal to its workers, wait for them, and end."""
        assert self._requests.signum is not None
        raise SignalException("", signal.Signals(self._requests.signum))

    @contextmanager
    def started_by_agent(self) -> Generator[None]:
        """Stop and end the workers that the agent starts inside the block.

        Frozen ones are killed when it ends the others after a failure: it would wait 30 s for them to react. Those that
        it ends have been stopped by no request, and are started again.
        """
        start, close, join = PContext.start, PContext.close, ProcessContext._join_procs_with_timeout
        wait = PContext.wait

        def start_all(context: PContext) -> None:
            self._is_starting = True
            # one that reaches a worker while it is forked would raise in a callback of the fork, and be lost
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
            try:
                start(context)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._context, self._is_starting = context, False
            if self._requests.signum is not None:
                context.close(signal.Signals(self._requests.signum), int(self._timeout_s))
                self._stop()

        def close_at_once(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            kill_frozen(context.pids().values())
            close(context, death_sig, timeout)

        def join_at_once(context: ProcessContext, timeout: float) -> None:
            kill_frozen(process.pid for process in context.processes)
            join(context, timeout)

        def wait_for_all(context: PContext, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
            result = wait(context, timeout, period)
            if result is not None and result.is_failed():
                first = min(result.failures.values(), key=lambda failure: failure.timestamp)
                if not was_stopped(first):
                    self._stopped.unlink(missing_ok=True)
            return result

        contexts: Any = PContext
        contexts.start, contexts.close, contexts.wait = start_all, close_at_once, wait_for_all
        ProcessContext._join_procs_with_timeout = join_at_once  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with replaced(elastic_processes, "_terminate_process_handler", self._hear):
                yield
        finally:
            contexts.start, contexts.close, contexts.wait = start, close, wait
            ProcessContext._join_procs_with_timeout = join


def explain(cfg: DictConfig, exc: ChildFailedError, num_processes: int, scratch: Path) -> BaseException:
    """Convert the agent's report into the worker's error: a ConfigError, or rank and reason of the first failure."""
    rank, failure = exc.get_first_failure()
    if was_stopped(failure):
        return Interrupted(failure.exitcode - 128)
    told = told_failure(scratch) if failure.exitcode >= 0 else None
    if told is None:
        killed = Failure(rank, how_it_ended(failure))
        report_killed(cfg, killed, num_processes)
        return WorkerError(f"rank {rank} failed: {killed.reason}", rank=rank)
    first = Failure(**told)
    if first.refused:
        return ConfigError(first.reason)
    status = failure.exitcode if failure.exitcode > 0 else 1
    return WorkerError(f"rank {first.rank} failed: {first.short}", first.trace, first.rank, status)


def was_stopped(failure: ProcessFailure) -> bool:
    """Whether a worker has ended in order because a signal asked it to."""
    return failure.exitcode in [128 + signum for signum in ASK_TO_STOP]


def told_failure(scratch: Path) -> dict[str, Any] | None:
    """What the first rank that failed in the last attempt has left."""
    files = sorted(scratch.glob(FAILURE_FILE.format("*")), key=lambda file: (len(file.name), file.name))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def how_it_ended(failure: ProcessFailure) -> str:
    """How a worker ended that left no traceback."""
    if failure.exitcode < 0:
        return f"it was killed by {failure.signal_name()} (process {failure.pid})"
    return f"it exited with status {failure.exitcode} (process {failure.pid})"
