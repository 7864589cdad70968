"""Extend Lightning's Trainer with the lean loops and this project's strategies, given as objects or by name."""

import inspect
import logging
import re
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, Literal, TypeAlias, TypeVar, cast

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
import torch.distributed as dist
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ..strategies import STRATEGIES
from ..strategies.batch.structure import num_samples
from ..strategies.core.devices import accelerator_type, give_devices, is_out_of_memory, peak_memory_bytes
from ..strategies.core.lightning_names import verify_family
from ..strategies.core.options import Count, verify_value
from ..strategies.core.patching import LIGHTNING_TELLS, filtered, replaced
from ..strategies.distributed.processes import handled
from ..strategies.registry import LIGHTNINGS_WORDS, ranks_of, stop_signal_of
from .callbacks import DetectNonFinite
from .checkpoint import Checkpoint, RunTimer, distinguish
from .checkpoint.checkpoint_io import VerifiedCheckpointIO
from .checkpoint.clean_points import ExactCheckpoints, ResumingFitLoop
from .loggers.journal import open_files, refresh_files
from .logging.connector import LeanLoggerConnector, lean_logging
from .loops.evaluation_loops import LeanEvaluationLoop, LeanPredictionLoop
from .loops.loops import LeanTrainingEpochLoop
from .loops.step_plan import TimedBar, is_tested

OnNonFinite: TypeAlias = Literal["raise", "skip_step", "off", False] | None

Method = TypeVar("Method", bound=Callable[..., Any])


def _verified(method: Method) -> Method:
    """Refuse modules of another Lightning, and keep the loggers' files across processes that the strategy starts."""

    @wraps(method)
    def verified(self: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        verify_family(*args, *kwargs.values())
        open_files(self.loggers)
        try:
            return method(self, *args, **kwargs)
        finally:
            refresh_files(self.loggers, method is pl.Trainer.fit, self.strategy.launcher is not None)

    return cast("Method", verified)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else [value]


def _is_no_tip(record: logging.LogRecord) -> bool:
    """Whether a line is none of Lightning's tips for other products."""
    return "Tip:" not in record.getMessage()


class DeviceOutOfMemory(torch.OutOfMemoryError):
    """torch's error with the device, the number of samples and advice."""


_SHARED_MEMORY = (
    "The data workers need more shared memory (/dev/shm) than there is. Give the container more (docker run "
    "--shm-size=8g, or --ipc=host), or set data.num_workers=0"
)
_ADVICE = {
    "for file </torch_": _SHARED_MEMORY,
    "It is possible that dataloader's workers are out of shared memory": _SHARED_MEMORY,
    "element 0 of tensors does not require grad": (
        "The loss has no gradient: it was detached, computed without gradients or made of numbers, or all parameters "
        "that it depends on are frozen. Return the loss as training_step has computed it from the module's parameters"
    ),
    "out of bounds for storage of size 0": (
        "The backward pass needs parameters that strategy=fsdp has released, because training_step computes gradients "
        "itself (torch.autograd.grad, of a penalty). Set strategy.shard=[], or use strategy=ddp"
    ),
}
"""What torch says, and what to say in its place."""


def explain(trainer: Any, exc: RuntimeError | ValueError) -> None:
    """Say in an error of torch's what to change; one of memory is raised as a `DeviceOutOfMemory`."""
    if isinstance(exc, RuntimeError) and is_out_of_memory(exc):
        raise _out_of_memory(trainer, str(exc)) from exc
    for words, advice in _ADVICE.items():
        if words in str(exc):
            exc.args = (f"{advice} ({exc}).",)


def _out_of_memory(trainer: Any, text: str) -> DeviceOutOfMemory:
    device, batch = trainer.strategy.root_device, getattr(trainer._results, "batch", None)
    count = None if batch is None else num_samples(batch)
    samples = "outside of a step" if count is None else f"{count} samples at once"
    if found := re.search(r"\bGPU (\d+)\b", text):
        device = torch.device((torch.accelerator.current_accelerator() or torch.device("cuda")).type, int(found[1]))
    if found := re.search(r"\[([^\[\]]+?),? on (\w+(?::\d+)?)\]$", text):  # a replica, named by the executor
        samples, device = found[1], torch.device(found[2])
    peak = peak_memory_bytes(device)
    total = 0 if peak is None else torch.accelerator.get_memory_info(device)[1]
    reached = "unknown" if peak is None else f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return DeviceOutOfMemory(
        f"Out of memory on {device}, rank {trainer.global_rank}, in step {trainer.global_step}: {samples}, peak "
        f"{reached}. Make data.batch_size smaller and trainer.accumulate_grad_batches larger by the same factor, "
        "set precision=bf16-mixed, or use more devices; strategy=balanced_dp gives the first device less. "
        f"({text.splitlines()[0]})"
    )


class Trainer(pl.Trainer):
    """`pytorch_lightning.Trainer` with loops of low overhead that also accepts this project's strategies.

    Args:
        strategy: a strategy object, or a name: one of `evener.strategies.STRATEGIES`, or any of Lightning's, of which
            those of ddp and fsdp (`ddp_find_unused_parameters_true`) take this project's. `auto` selects
            `single_device` for one device and `ddp` for several.
        exact_accumulation: whether an accumulated step is the mean over all its samples (or `loss_weight`s), including
            short tails and ragged micro-batches. False keeps Lightning's rule: every micro-batch's loss is divided
            by `accumulate_grad_batches`.
        detect_nonfinite: what to do if gradients are inf or nan: `raise` stops training, `skip_step` skips the
            optimizer step, `off` (or False, as YAML reads off) does not check. See `DetectNonFinite`.
        lean: whether common steps take this project's lean path. None does so unless torch has a version
            that it was not tested with; then Lightning's own loops run.
        **kwargs: every argument of `pytorch_lightning.Trainer`, with the same meaning and default; `devices` may also
            be a list of names (`["cuda:0", "cpu"]`) for a strategy of one process.
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        exact_accumulation: bool = False,
        detect_nonfinite: OnNonFinite = "off",
        lean: bool | None = None,
        **kwargs: Any,
    ) -> None:
        given: dict[str, Any] = {**kwargs}
        verify_value("detect_nonfinite", detect_nonfinite, OnNonFinite, "Trainer: ")
        if isinstance(strategy, str):  # a word of Lightning's is left to it
            make = STRATEGIES.get(word := strategy.lower()) or LIGHTNINGS_WORDS.get(word)
            strategy = make() if make else word
        given |= give_devices(strategy, given.get("devices"))
        if given.get("accelerator", "auto") in ("auto", "gpu"):  # Lightning's choose among its own accelerators only
            given["accelerator"] = accelerator_type(given.get("accelerator", "auto"))
        if "accumulate_grad_batches" in given:  # of which Lightning takes 0, too
            verify_value("accumulate_grad_batches", given["accumulate_grad_batches"], Count, "Trainer: ")
        verify_family(strategy, *_flat(given.values()))
        own_callbacks = list(_flat([given.get("callbacks") or []]))  # Lightning appends its own bar to the very list
        distinguish(own_callbacks)
        with filtered(LIGHTNING_TELLS, _is_no_tip):
            super().__init__(strategy=strategy, **given)
        if strategy == "auto":
            self._choose_own_strategy()
        callbacks: list[Any] = self.callbacks  # pyright: ignore[reportAttributeAccessIssue]  # not declared
        own = {id(callback) for callback in own_callbacks}  # Lightning's bar, and its timer of `max_time`, are replaced
        callbacks[:] = [RunTimer(cb) if isinstance(cb, Timer) and id(cb) not in own else cb for cb in callbacks]
        bar = self.progress_bar_callback
        self.timed_bar = None if bar is None or id(bar) in own else TimedBar(bar)
        self.exact_accumulation = exact_accumulation
        self.lean = is_tested(torch.__version__) if lean is None else lean
        self.agreed_to_stop = False
        self._signal: int | None = None
        self._agreed_log_dir: tuple[str | None] | None = None
        if detect_nonfinite not in ("off", False, None):
            callbacks.insert(0, DetectNonFinite(detect_nonfinite))
        self._make_lean(bool(given.get("inference_mode", True)))
        # Lightning's logs from within the handler; a strategy of several processes puts its own in this place
        self._signal_connector._sigterm_notifier_fn = self._on_signal
        own = self.strategy._checkpoint_io is not None  # the strategy's own, or given by the user
        if not own and type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = VerifiedCheckpointIO()

    def _choose_own_strategy(self) -> None:
        """Replace the strategy that Lightning selected for the devices by the corresponding one of this project."""
        connector = self._accelerator_connector
        own: dict[Any, str] = {pl_strategies.SingleDeviceStrategy: "single_device", pl_strategies.DDPStrategy: "ddp"}
        if (word := own.get(type(connector.strategy))) is not None:
            connector._strategy_flag = STRATEGIES[word]()
            connector._init_strategy()
            connector._lazy_init_strategy()

    def _make_lean(self, inference_mode: bool) -> None:
        """Replace Lightning's loops, which have not run yet, with the lean ones, which also resume exactly."""
        connector: Any = LeanLoggerConnector(self)
        self._logger_connector = connector
        self._checkpoint_connector = ExactCheckpoints(self)
        lightnings = self.fit_loop
        self.fit_loop = ResumingFitLoop(self, lightnings.min_epochs, lightnings.max_epochs)
        self.fit_loop.epoch_loop = LeanTrainingEpochLoop(self, lightnings.min_steps, lightnings.max_steps)
        mode = {"inference_mode": inference_mode}
        self.validate_loop = LeanEvaluationLoop(self, TrainerFn.VALIDATING, RunningStage.VALIDATING, **mode)
        self.test_loop = LeanEvaluationLoop(self, TrainerFn.TESTING, RunningStage.TESTING, **mode)
        self.predict_loop = LeanPredictionLoop(self, **mode)

    fit = _verified(pl.Trainer.fit)
    validate = _verified(pl.Trainer.validate)
    test = _verified(pl.Trainer.test)
    predict = _verified(pl.Trainer.predict)

    @override
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._agreed_log_dir = None
        try:
            with filtered(LIGHTNING_TELLS, _is_no_tip):
                return super()._run(*args, **kwargs)
        except (RuntimeError, ValueError) as exc:
            explain(self, exc)
            raise

    @property
    @override
    def log_dir(self) -> str | None:
        """The log directory of rank 0: broadcast as the run starts, so that any rank may read it alone."""
        if not dist.is_available() or not dist.is_initialized():
            return super().log_dir
        if self._agreed_log_dir is None:
            self._agreed_log_dir = (super().log_dir,)
        return self._agreed_log_dir[0]

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        loop = self.fit_loop  # whose loader is in the ranks that a script has started, and has told its length
        knows = loop._data_source.instance is None and loop.max_batches != float("inf")
        with replaced(loop, "setup_data", lambda: None) if knows else nullcontext():
            return super().estimated_stepping_batches

    @override
    def _run_stage(self) -> Any:
        self.agreed_to_stop, self._signal = False, None
        try:
            with lean_logging(self), self._more_signals():
                return super()._run_stage()
        except SIGTERMException as exc:
            told = stop_signal_of(self.strategy) or self._signal
            exc.code = exc.code or 128 + (told or signal.SIGTERM)  # with Lightning's a script would exit with status 0
            raise

    @contextmanager
    def _more_signals(self) -> Generator[None]:
        """Take Ctrl-C, SIGHUP and SIGUSR1 for SIGTERM while a script fits, unless somebody handles or ignores them."""

        def stop(at_once: bool, signum: int, frame: FrameType | None) -> None:
            savers = [callback for callback in self.checkpoint_callbacks if isinstance(callback, Checkpoint)]
            saves = self.fit_loop.takes_steps and any(saver.save_last for saver in savers)
            if at_once or (signum == signal.SIGINT and not saves):  # after this step it would save nothing
                raise KeyboardInterrupt
            # a strategy of several processes has a function of its own in this place
            self._signal_connector._sigterm_notifier_fn(signum, frame)  # pyright: ignore[reportArgumentType]  # untyped

        signals = (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT) if self.state.fn == TrainerFn.FITTING else ()
        free = [s for s in signals if signal.getsignal(s) in (signal.SIG_DFL, signal.default_int_handler)]
        with handled(stop, free) as requests:
            try:
                yield
            except SIGTERMException as exc:
                if signal.SIGINT in free and requests.signum == signal.SIGINT:  # what Lightning and scripts expect
                    raise KeyboardInterrupt from exc
                raise

    def _on_signal(self, signum: int, _: object) -> None:
        self._signal = signum
        self._signal_connector.received_sigterm = True

    @property
    @override
    def received_sigterm(self) -> bool:
        """Whether to stop because of a SIGTERM: not within a fit's validation, and ranks once all have agreed."""
        if self.validating and self.state.fn == TrainerFn.FITTING:
            return False
        if self.training and ranks_of(self.strategy) is not None:
            return self.agreed_to_stop
        return super().received_sigterm


def _signature() -> inspect.Signature:
    """Lightning's arguments and ours, for introspection by IDEs, Hydra, LightningCLI and environment variables."""
    lightnings = inspect.signature(pl.Trainer.__init__)
    ours = inspect.signature(Trainer.__init__).parameters
    parameters = {name: ours.get(name, parameter) for name, parameter in lightnings.parameters.items()}
    parameters |= {name: ours[name] for name in ("exact_accumulation", "detect_nonfinite", "lean")}
    return lightnings.replace(parameters=list(parameters.values()))


Trainer.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
