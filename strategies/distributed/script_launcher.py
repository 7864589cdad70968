"""Start the processes of a plain script or notebook from `fit`, and stop them at a signal to any of them."""

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, MethodType
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
import torch.multiprocessing as multiprocessing_of_torch
from lightning_fabric.strategies.launchers.multiprocessing import _disable_module_memory_sharing
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from lightning_fabric.utilities.imports import _IS_INTERACTIVE
from pytorch_lightning.strategies.launchers.launcher import _Launcher
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ..core import rng
from ..core.errors import ConfigError
from ..core.files import replacing, scratch_directory
from ..core.module_checks import verify_shapes
from . import processes
from ._handback import known_objects, pack, reduce_method, unpack
from .processes import RankProcesses, StopRequests
from .store import RankError, hosted_store, leave_store

StartMethod: TypeAlias = Literal["fork", "spawn", "forkserver"]
"""How a plain script's processes start, in the words of `multiprocessing`."""

POLL_S = 0.1  # between two looks at the processes, at most; the end of one is seen at once
END_S, STOP_S = 3.0, 300.0  # from SIGTERM to a rank's end where another one has failed, and where it saves
STOPS_ALONE = 128 + signal.SIGTERM  # exit status of a rank that has stopped by a signal, without the others
STOPPED = "stopped by a signal"  # what rank 0 returns if the processes stopped together


def start_method(device: torch.device, given: StartMethod | None = None, strategy: str = "ddp") -> StartMethod:
    """Choose how a plain script's processes start: `fork` on the CPU and in notebooks, `spawn` for accelerators."""
    if _IS_INTERACTIVE and given not in (None, "fork"):
        raise ConfigError(
            f"{strategy}: start_method={given} was given in a notebook, whose cells a new process can't import. "
            "Use start_method=fork, or run a script."
        )
    method = given or ("fork" if device.type == "cpu" or _IS_INTERACTIVE else "spawn")
    if method == "fork" and device.type != "cpu" and torch.get_device_module(device).is_initialized():
        raise ConfigError(
            f"{strategy}: this process has used the GPU already, so it can't fork ranks. Use strategy=dp, which needs "
            "one process; or call fit before anything uses the GPU (in a notebook after a restart of the kernel); or "
            "run a script without start_method=fork."
        )
    return method


class ScriptLauncher(_Launcher):
    """Starts the processes of a plain script, each of which runs the trainer, and brings back what rank 0 has done.

    From the first end of a rank to that of the last there are at most `timeout_s` seconds.
    """

    def __init__(self, strategy: Any, timeout_s: float, method: StartMethod | None) -> None:
        self._strategy, self._timeout_s = strategy, timeout_s
        self._start_method = start_method(strategy.root_device, method, strategy.strategy_name)
        self._is_in_rank = False

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._start_method == "fork"

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
        """Run a function of the trainer in every rank; return what it returns in rank 0, or raise what ended a rank."""
        if self._is_in_rank:
            return function(*args, **kwargs)
        try:
            return self._launch(partial(function, *args, **kwargs), trainer)
        except BaseException:
            # the ranks have called `on_exception`, and nothing is to be saved here; the teardown, which comes next,
            # gives the callbacks back
            trainer.strategy.group.at_end = partial(setattr, trainer, "callbacks", trainer.callbacks)
            trainer.callbacks = []
            raise

    def _launch(self, work: partial[Any], trainer: Any) -> Any:
        verify_shapes(trainer.lightning_module)
        known, strategy = known_objects(trainer, (work.args, work.keywords)), self._strategy
        context: Any = multiprocessing.get_context(self._start_method)
        with scratch_directory() as folder, self._store() as variables:
            ranks = RankProcesses(POLL_S, END_S, self._timeout_s)
            state = rng.random_state(), torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
            with forwarded_signals(ranks, min(self._timeout_s, STOP_S)) as requests:
                with processes.forking() if self._start_method == "fork" else shared_by_name():
                    for rank in range(strategy.num_processes):
                        args = (rank, folder, trainer, work, {**variables, "LOCAL_RANK": str(rank)}, state)
                        process = context.Process(target=self._run_rank, args=args)
                        process.start()
                        ranks.processes.append(process)
                failed = ranks.join()
            if ranks.late:
                raise RankError(
                    f"rank {', '.join(map(str, ranks.late))} did not end within {self._timeout_s:g} s after the "
                    "others had, and was killed. See what on_fit_end, teardown and threads of the module and the "
                    "callbacks do there."
                )
            result = folder / "result"
            returned = unpack(trainer, known, result.read_bytes()) if result.exists() else STOPPED
            # a signal to the whole group also reaches ranks that have no handler yet
            asked = (STOPS_ALONE, -(requests.signum or signal.SIGTERM), -signal.SIGTERM)
            if failed is not None and ranks.processes[failed].exitcode not in asked:
                raise _error(ranks.processes[failed], failed, folder / f"error{failed}")
        if failed is not None or requests.signum is not None or returned == STOPPED:
            raise _stop(requests.signum or signal.SIGTERM)
        return returned

    def _store(self) -> AbstractContextManager[dict[str, str]]:
        """Host the store of ranks of one machine, which outlives each of them; the variables that lead ranks to it."""
        if self._strategy.num_nodes == 1:
            return hosted_store()
        assert self._strategy.cluster_environment is not None
        return nullcontext({"MASTER_PORT": str(self._strategy.cluster_environment.main_port)})

    @override
    def kill(self, signum: int) -> None:
        """Signals are forwarded while the processes run."""

    def _run_rank(
        self, rank: int, folder: Path, trainer: Any, work: partial[Any], variables: dict[str, str], state: Any
    ) -> None:
        """Be one rank; rank 0 leaves its results in a folder, and one that fails what the script is to raise."""
        processes.handle_no_more()
        try:
            os.environ.update(variables)
            random_state, deterministic, torch.backends.cudnn.benchmark = state
            torch.set_deterministic_debug_mode(deterministic)
            _set_num_threads_if_needed(num_processes=self._strategy.num_processes)
            processes.prepare_forked()
            rng.set_random_state(random_state)  # Python seeds its own anew in a forked process
            torch.manual_seed(torch.initial_seed())  # of accelerators; the others go on where the script's are
            rng.set_random_state(random_state)
            if self._start_method != "fork":
                _disable_module_memory_sharing(trainer.lightning_module)
            known = known_objects(trainer, (work.args, work.keywords))
            self._is_in_rank = True
            returned: Any = STOPPED  # or failed
            try:
                returned = _in_rank(trainer, work)
            finally:
                leave_store()
                if rank == 0:
                    with replacing(folder / "result") as file:
                        file.write_bytes(pack(trainer, known, returned, returned != STOPPED))
        except BaseException as exc:  # noqa: BLE001  # an exit, too
            if isinstance(exc, SIGTERMException):  # this rank has stopped alone
                sys.exit(STOPS_ALONE)
            with replacing(folder / f"error{rank}") as file:
                file.write_bytes(pickle.dumps(_raised(exc, rank)))
            sys.exit(1)


def _in_rank(trainer: pl.Trainer, work: Callable[[], Any]) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends these to all processes; the script forwards them
    signal.signal(signal.SIGHUP, lambda signum, frame: processes.leave_terminal())
    try:
        return call._call_and_handle_interrupt(trainer, work)
    except SIGTERMException:
        strategy: Any = trainer.strategy
        if strategy.group.stop_signal is None:
            raise
        return STOPPED


def _raised(exc: BaseException, rank: int) -> BaseException:
    """What a script raises for an error of a rank; an exit that the user's code has asked for ends the script, too."""
    if isinstance(exc, ConfigError):
        return ConfigError(str(exc))
    if isinstance(exc, Exception):
        return RankError(f"rank {rank} failed:\n\n{traceback.format_exc()}")
    sys.stderr.write(f"rank {rank} has ended the run:\n\n{traceback.format_exc()}")
    return SystemExit(getattr(exc, "code", 1))  # also for what Lightning makes of a KeyboardInterrupt


def _error(process: Any, rank: int, path: Path) -> BaseException:
    """What a rank that has failed has left in a file, or how it ended."""
    if path.exists():
        error: BaseException = pickle.loads(path.read_bytes())
        return error
    status = process.exitcode or 0
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return RankError(f"rank {rank} {how} (process {process.pid}).")


@contextmanager
def shared_by_name() -> Generator[None]:
    """Send tensors inside the block by names of shared memory, of which there may be more than descriptors, and methods
    under whatever name their object has them.
    """
    ForkingPickler.register(MethodType, reduce_method)
    before = multiprocessing_of_torch.get_sharing_strategy()
    multiprocessing_of_torch.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing_of_torch.set_sharing_strategy(before)


def forwarded_signals(ranks: RankProcesses, within_s: float) -> AbstractContextManager[StopRequests]:
    """Forward signals that ask to stop to the processes, which stop at one step; a second Ctrl-C kills them."""

    def forward(at_once: bool, signum: int, _: FrameType | None) -> None:
        if at_once or not ranks.processes:
            ranks.end(signal.SIGKILL)
            raise _stop(signum)
        ranks.end(signal.SIGTERM, within_s)

    own = {signum for signum in (signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(signum) != signal.SIG_DFL}
    return processes.handled(forward, {*processes.ASK_TO_STOP} - own)  # a script's own handler of these is kept


def _stop(signum: int) -> BaseException:
    """The exception that `fit` raises after a signal, the same as Lightning's on one device."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SIGTERMException(128 + signum)
