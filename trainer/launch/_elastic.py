"""Start the workers of one machine with torch's elastic agent, and report their failures."""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...strategies import ConfigError
from ...strategies.core.scratch import scratch_directory
from ...strategies.distributed.store import loopback_device
from ..job.failure import Failure, report_killed, users_frames
from ..job.result import Result
from ..job.signals import ASKS_TO_STOP, Interrupted, loss
from ._rendezvous import options as rendezvous
from .environment import AGENT, STOPPED_FILE, WorkerError, environment

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that stop a run gracefully."""


def launch_workers(cfg: DictConfig, num_processes: int) -> Result:
    """Start one worker per process with torch's elastic agent, and wait for the result."""
    with scratch_directory() as scratch, environment(worker_environment(num_processes)):
        config_file = scratch / "config.yaml"
        config_file.write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
        agent = elastic_launch(launch_config(cfg, num_processes, str(scratch)), entrypoint=sys.executable)
        try:
            with signal_handlers_kept():  # a second signal finds the agent's handlers gone, which would raise its error
                agent("-m", "evener.trainer.launch.worker", str(config_file))
        except ChildFailedError as exc:
            raise explain(cfg, exc, num_processes) from None
        except SignalException as exc:
            if not (scratch / STOPPED_FILE).exists():
                raise cut_off(cfg, exc.sigval, num_processes) from None
            raise Interrupted(exc.sigval) from None
    return Result.read(cfg.run_dir)


def cut_off(cfg: DictConfig, signum: int, num_processes: int) -> WorkerError:
    """Tell what a signal has cost where the workers were killed before they could save."""
    reason = (
        f"{signal.Signals(signum).name} ended this run before it could save: a step, or a batch of validation, took "
        f"longer than launcher.shutdown_timeout_s={cfg.launcher.shutdown_timeout_s:g} s, and {loss(cfg.run_dir)}. "
        "Give more seconds."
    )
    report_killed(cfg, Failure(0, reason), num_processes)
    return WorkerError(reason)


def launch_config(cfg: DictConfig, num_processes: int, log_dir: str) -> LaunchConfig:
    """Configure the elastic agent for one node; its workers meet on the loopback, at a port that the system picks."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        # what is ignored stays so: SIGHUP under nohup
        signals_to_handle=",".join(s.name for s in AGENT_SIGNALS if signal.getsignal(s) != signal.SIG_IGN),
        **rendezvous(),
        max_restarts=cfg.launcher.max_restarts,
        monitor_interval=cfg.launcher.monitor_interval_s,
        shutdown_timeout=cfg.launcher.shutdown_timeout_s,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
    )


def worker_environment(num_processes: int) -> dict[str, str]:
    """Environment variables of the workers, in addition to the agent's."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    return {
        **loopback_device(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        AGENT: str(os.getpid()),
        # keep modules next to the user's train.py importable
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


@contextmanager
def signal_handlers_kept() -> Generator[None]:
    """Restore this process's signal handlers afterwards: the agent does not remove its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in AGENT_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(cfg: DictConfig, exc: ChildFailedError, num_processes: int) -> BaseException:
    """Convert the agent's report into the worker's error: a ConfigError, or rank and reason of the first failure."""
    rank, failure = exc.get_first_failure()
    if failure.exitcode in [128 + signum for signum in (*ASKS_TO_STOP, signal.SIGTERM)]:
        return Interrupted(failure.exitcode - 128)
    kind, _, message = first_line(failure)
    if kind in (ConfigError.__name__, MisconfigurationException.__name__):
        return ConfigError(message)
    trace = traceback_of(failure)
    if trace:
        return WorkerError(f"rank {rank} failed: {users_frames(trace)}", trace)
    killed = Failure(rank, how_it_ended(failure))
    report_killed(cfg, killed, num_processes)
    return WorkerError(f"rank {rank} failed: {killed.reason}")


def first_line(failure: ProcessFailure) -> tuple[str, str, str]:
    """Split a failure's message into exception name, separator, and text."""
    message = failure.error_file_data.get("message") if failure.error_file_data else None
    text = message.get("message", "") if isinstance(message, dict) else str(message or "")
    return text.partition(": ")


def traceback_of(failure: ProcessFailure) -> str:
    """The worker's traceback; empty if it left none."""
    message = failure.error_file_data.get("message") if failure.error_file_data else None
    if isinstance(message, dict):
        return message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
    return ""


def how_it_ended(failure: ProcessFailure) -> str:
    """How a worker ended that left no traceback."""
    if failure.exitcode < 0:
        return f"it was killed by {failure.signal_name()} (process {failure.pid})"
    return f"it exited with status {failure.exitcode} (process {failure.pid})"
