"""Start the processes of a plain script or notebook from `fit`, and bring back what rank 0 has done.

Objects that the script has (the trainer, the module's layers and parameters, callbacks, loggers) are *known*: each side
makes the same list of them. Rank 0 pickles their attributes; where an attribute refers to a known object, its number
travels instead of the object, and the script's own object takes its place.
"""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, MethodType
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
import torch.multiprocessing as multiprocessing_of_torch
from lightning_fabric.strategies.launchers.multiprocessing import _disable_module_memory_sharing
from lightning_fabric.utilities import move_data_to_device
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from lightning_fabric.utilities.imports import _IS_INTERACTIVE
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.progress import _BaseProgress
from pytorch_lightning.strategies.launchers.launcher import _Launcher
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from ..core import rng
from ..core.errors import ConfigError
from ..core.files import replacing, scratch_directory
from ..core.module_checks import callbacks_of, verify_shapes
from . import processes
from .processes import RankProcesses, StopRequests
from .store import RankError, hosted_store, leave_store

StartMethod: TypeAlias = Literal["fork", "spawn", "forkserver"]
"""How a plain script's processes start, in the words of `multiprocessing`."""

POLL_S = 0.1  # between two looks at the processes, at most; the end of one is seen at once
END_S, STOP_S = 3.0, 300.0  # from SIGTERM to a rank's end where another one has failed, and where it saves
STOPS_ALONE = 128 + signal.SIGTERM  # exit status of a rank that has stopped by a signal, without the others

_REGISTERED = ("_parameters", "_buffers", "_modules")
_INTERNAL = {*vars(pl.LightningModule())}.difference(
    _REGISTERED, ("_non_persistent_buffers_set", "training", "_hparams")
)
"""Attributes of modules that stay the script's."""
_LIBRARIES = ("pytorch_lightning", "lightning", "lightning_fabric", "evener", "torch", "torchmetrics")


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
            # a signal to the whole group also reaches ranks that have no handler yet
            asked = (STOPS_ALONE, -(requests.signum or signal.SIGTERM), -signal.SIGTERM)
            if failed is not None and ranks.processes[failed].exitcode not in asked:
                raise _error(ranks.processes[failed], failed, folder / f"error{failed}")
            result = folder / "result"
            if failed is not None or requests.signum is not None or not result.exists():
                raise _stop(requests.signum or signal.SIGTERM)
            return unpack(trainer, known, result.read_bytes())

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
            processes.die_with_starter()
            if self._start_method != "spawn" and not processes.openmp_released:
                torch.set_num_threads(1)
            rng.set_random_state(random_state)  # Python seeds its own anew in a forked process
            torch.manual_seed(torch.initial_seed())  # of accelerators; the others go on where the script's are
            rng.set_random_state(random_state)
            if self._start_method != "fork":
                _disable_module_memory_sharing(trainer.lightning_module)
            known = known_objects(trainer, (work.args, work.keywords))
            self._is_in_rank = True
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends these to all; the script forwards them
            signal.signal(signal.SIGHUP, lambda signum, frame: processes.leave_terminal())
            try:
                returned = call._call_and_handle_interrupt(trainer, work)
            finally:
                leave_store()
            if rank == 0:
                with replacing(folder / "result") as file:
                    file.write_bytes(pack(trainer, known, returned))
        except SIGTERMException:
            sys.exit(0 if self._strategy.group.stop_signal is not None else STOPS_ALONE)
        except BaseException as exc:  # noqa: BLE001  # an exit, too
            with replacing(folder / f"error{rank}") as file:
                file.write_bytes(pickle.dumps(_raised(exc, rank)))
            sys.exit(1)


Known: TypeAlias = list[tuple[Any, Sequence[str] | None]]
"""Objects, each with the names of its attributes that a run changes; None for whatever there are."""


def known_objects(trainer: pl.Trainer, given: Any) -> Known:
    """List, in one order on both sides, what a script has before its ranks start, and has `given` to `fit`."""
    module = trainer.lightning_module
    metrics = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter")
    whole = (*_loops(trainer), *module.modules(), *module.parameters(), *callbacks_of(trainer), *trainer.loggers)
    known: Known = [
        *((one, ()) for one in tree_leaves(given) if hasattr(one, "__dict__")),
        (trainer, ("callbacks", "state", "should_stop")),
        (trainer._logger_connector, metrics),
        (trainer.strategy, ("optimizers", "lr_scheduler_configs")),
        (trainer.precision_plugin, ("scaler",)),
        *((one, None) for one in whole),
    ]
    return [*{id(one): (one, names) for one, names in known}.values()]


def _loops(owner: object) -> Iterator[_Loop]:
    for loop in vars(owner).values():
        if isinstance(loop, _Loop):
            yield loop
            yield from _loops(loop)


def pack(trainer: pl.Trainer, known: Known, results: Any) -> bytes:
    """Write down, in rank 0, what its run has changed of known objects; without what can't be pickled."""
    ids = {id(one): number for number, (one, _) in enumerate(known)}
    _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics  # which collects them
    attributes, weights, lost = dict[int, Any](), dict[int, Any](), list[str]()
    for number, (one, names) in enumerate(known):
        if isinstance(one, nn.Parameter):
            weights[number] = one.detach(), one.requires_grad
            continue
        found = _changed(one, names)
        attributes[number] = {key: item for key, item in found.items() if _pickles(item, ids)}
        if names or type(one).__module__.partition(".")[0] not in _LIBRARIES:
            lost += [f"{type(one).__name__}.{key}" for key in found if key not in attributes[number]]
    results = move_data_to_device(results, torch.device("cpu"))
    return _dumps((attributes, weights, rng.random_state(), results, lost), ids)


def _changed(one: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The attributes of a known object that a run may have changed; the methods that it was given are the script's."""
    if names is not None:
        return {key: getattr(one, key) for key in names if hasattr(one, key)}
    if isinstance(one, _Loop):
        plain, named = (_BaseProgress, bool, int, float), getattr(one, "brought_back", ())
        return {key: item for key, item in vars(one).items() if isinstance(item, plain) or key in named}
    return {key: item for key, item in vars(one).items() if key not in _INTERNAL and not isinstance(item, MethodType)}


def unpack(trainer: pl.Trainer, known: Known, packed: bytes) -> Any:
    """Bring a script's known objects to the state of rank 0's; return what the trainer returned there."""
    unpickler = pickle.Unpickler(io.BytesIO(packed))
    unpickler.persistent_load = [one for one, _ in known].__getitem__
    attributes, weights, random_state, results, lost = unpickler.load()
    for number, (data, requires_grad) in weights.items():
        parameter = known[number][0]
        parameter.grad, parameter.data = None, data
        parameter.requires_grad_(requires_grad)
    module = trainer.lightning_module
    module.trainer = trainer
    trainer.strategy.connect(module)
    for number, found in attributes.items():
        owner, names = known[number]
        for key in (key for space in _REGISTERED for key in found.get(space, ())):
            vars(owner).pop(key, None)  # a layer has taken the place of an attribute that was None, say
        for key, value in found.items():
            if names is None:
                vars(owner)[key] = value
            else:  # some are properties
                setattr(owner, key, value)
    rng.set_random_state(random_state)
    if lost:
        rank_zero_warn(
            f"{', '.join(lost)}: can't be brought back from the processes that trained, because it can't be pickled; "
            "here it is as it was before. Keep what the script needs in plain attributes."
        )
    return results


def _dumps(value: Any, ids: Mapping[int, int]) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda one: ids.get(id(one))
    pickler.dump(value)
    return file.getvalue()


def _pickles(value: Any, ids: Mapping[int, int]) -> bool:
    try:
        _dumps(value, ids)
    except Exception:  # noqa: BLE001  # anything that a user's __reduce__ raises
        return False
    return True


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
    """Send tensors inside the block by names of shared memory, of which there may be more than descriptors."""
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
