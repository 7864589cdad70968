"""Run a step of a module on a few samples, whole or in parts that may meet, leaving no trace."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import _init_optimizers_and_lr_schedulers
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from ...core.errors import PartsDiffer
from ...core.executor import Piece
from ...core.module_checks import is_plain
from ...core.module_log import LOG_OPTIONS, lightning_modules, module_log, received
from ...core.patching import hooks_of, kept_metrics, replaced
from ...core.types import Batch
from ..evaluation_lists import Appended, PartLists
from ..meeting import Combine, Meeting, SimulatedRanks, seat, simulating
from ..part_metrics import PartMetrics
from ..results import combine, is_loss, weight_in
from ..run_structures import seeded
from .loss_reader import graph
from .module_state import ModuleState, Written
from .program_finder import Seen
from .programs import RETURNED

MakesBatch: TypeAlias = Callable[[int, int], Batch]
"""Makes a batch of the samples from i to j."""

_DRAWING = (
    nn.MultiheadAttention, nn.RReLU, nn.TransformerDecoderLayer, nn.TransformerEncoderLayer, _DropoutNd, _NormBase,
)  # fmt: skip
"""Of torch's layers those that draw, or see other samples, in training; a spectral norm only advances its estimate."""


class Cannot(Exception):  # told, and no error
    """The module can't be verified; says why."""


@dataclass
class Ran(Seen):
    """What a step has done on some samples; its first part knows what metrics were `given`, and which of it is `rows`.

    In manual optimization each call of `manual_backward` has a loss. `calls` are the submodules that it
    has called, in order, `open` those in whose forward it is.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    unused: bool = False
    weight: Any = None
    written: dict[str, Written] = field(default_factory=dict[str, Written])
    given: dict[Any, Any] = field(default_factory=dict[Any, Any])
    rows: set[Any] = field(default_factory=set[Any])
    output: Any = None
    appended: Appended = field(default_factory=Appended)
    calls: list[str] = field(default_factory=list[str])
    open: list[str] = field(default_factory=list[str])
    outside: set[str] = field(default_factory=set[str])


class Trial:
    """Runs a step of a module that a strategy has placed, by all ranks `together` or by one alone.

    In evaluation mode are, by `evaluates`, 0: layers of torch that draw random numbers; 1: also those of others that
    hold no layers; 2: all. Chunks run `in_turn` if each finds the module as the one before has left it.
    """

    def __init__(self, strategy: Any, step: str, together: bool) -> None:
        self.strategy, self.name, self.step, self.together = strategy, strategy.strategy_name, step, together
        self.module: pl.LightningModule = strategy.lightning_module
        self.trains, self.of_ranks = step == "training_step", False
        self.rest: Sequence[Any] = ()
        """Arguments of the step after the batch."""
        self.evaluates = 0 if self.trains else 2
        devices = {parameter.device for parameter in self.module.parameters()}
        # where a step expects its batch; shards are made of a module that is not on its device yet
        self.device: torch.device = devices.pop() if len(devices) == 1 else self.module.device
        layout = getattr(strategy, "layout", None)  # not of one device, where batches are accumulated
        self.in_turn = layout is not None and layout.cut_by.startswith("num_microbatches")
        self.sees_calls = self.trains and hasattr(strategy, "shards") and not together

    @property
    def goes_on(self) -> bool:
        """Whether a part finds the module as the part before has left it."""
        return self.in_turn and not self.of_ranks

    def run(self, batch: MakesBatch, *places: int, seed: int = 1, given: Sequence[Written] = ()) -> list[Ran]:
        """Run the step on the samples between each two places, with what another step has left, if `given`."""
        module, trainer = self.module, self.module.trainer
        pairs = list(itertools.pairwise(dict.fromkeys(places)))
        batches, sizes = [batch(i, j) for i, j in pairs], [j - i for i, j in pairs]
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(seeded(seed, self.device))
            state = enter(ModuleState(module))
            enter(kept_metrics(module))
            enter(replaced(trainer, "_loggers", [_Silent(own) for own in trainer._loggers]))
            enter(torch.set_grad_enabled(self.trains))
            for part in module.modules():
                part.training = part.training and not _evaluates(part, self.evaluates)
            parts = _Parts(self, batches, sizes, state, given)
            enter(received((module_log(part), parts.log) for part in lightning_modules(module)))
            if self.sees_calls:
                stack.callback(register_module_forward_pre_hook(parts.enter).remove)
                stack.callback(register_module_forward_hook(parts.leave, always_call=True).remove)
            if not self.together:
                enter(simulating(SimulatedRanks(len(sizes) if self.of_ranks else 1)))
            if not module.automatic_optimization:
                _hold_optimizers(module, parts.backward)
            elif self.trains and not self.of_ranks:
                unread = property(partial(_refuse_to_read, self.name), getattr(Tensor.grad, "__set__"))  # noqa: B009
                enter(replaced(nn.Parameter, "grad", unread))
            metrics = PartMetrics(module, [self.device] * len(sizes), self.name, parts.number)
            stack.callback(metrics.close)
            with nullcontext() if self.of_ranks else metrics.recording(sizes, notes=True), parts:
                for piece in parts.pieces:
                    piece.call()
            found = parts.found
            found[0].given, found[0].rows = metrics.replay(partial(_mean_loss, found)), metrics.rows
        for one in found if self.goes_on else ():
            one.written.update(state.written())
        return found


class _Parts(Meeting):
    """Parts that run, and meet, in one module as in one of each."""

    def __init__(
        self, trial: Trial, batches: Sequence[Batch], sizes: Sequence[int], state: ModuleState, given: Sequence[Written]
    ) -> None:
        pieces = zip(sizes, batches, strict=True)
        super().__init__([Piece(trial.device, f"{num} samples", partial(self._step, one)) for num, one in pieces])
        self._trial, self._base, self._left = trial, state, given
        self._states = dict[int, ModuleState]()
        self.found = [Ran(num) for num in sizes]
        self._names = {part: name for name, part in trial.module.named_modules()}
        self._trained = [p for p in trial.module.parameters() if p.requires_grad]  # a toggled optimizer freezes some
        self._hooks = _hooks(trial.module)

    @staticmethod
    def number() -> int:
        """That of the part whose step runs."""
        place = seat()
        return 0 if place is None else place.part

    @property
    def _here(self) -> Ran:
        return self.found[self.number()]

    def enter(self, part: nn.Module, _: Any) -> None:
        """Note that a submodule is called."""
        self._here.calls.append(self._names.get(part, ""))
        self._here.open.append(self._here.calls[-1])

    def leave(self, *_: Any) -> None:
        """Note that its call has ended."""
        self._here.open.pop()

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Note a loss that goes backward."""
        self._here.losses.append(loss)
        self._here.unused |= _leaves_out(loss, self._trained)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Note what is logged as a mean."""
        options.update(zip(LOG_OPTIONS, args, strict=False))
        if options.get("reduce_fx", "mean") in ("mean", torch.mean):
            self._here.tape.log(name, value, options.get("batch_size"))

    def _step(self, batch: Batch) -> None:
        trial = self._trial
        if trial.goes_on or (trial.together and trial.trains):
            self._base.give(self._left)
            return self._run_step(batch)
        state = self._states[self.number()] = ModuleState(trial.module, self._base)
        with state:
            state.give(self._left)
            self._run_step(batch)
        self._here.written.update(state.written())
        return None

    def _run_step(self, batch: Batch) -> None:
        trial, module, here = self._trial, self._trial.module, self._here
        lists = PartLists([vars(part) for part in lightning_modules(module)])
        with _Watch(trial, here), here.tape:
            output: Any = getattr(module, trial.step)(batch, *trial.rest)
        if not trial.of_ranks and self._hooks != _hooks(module):
            raise PartsDiffer(
                f"{trial.name}: {trial.step} registers or removes hooks, as each part of a batch would. Register "
                "them in __init__, setup or on_fit_start."
            )
        lists.take((0, 0), here.num)
        here.weight, here.output, here.appended = weight_in(output), output, lists.added
        loss = output.get("loss") if isinstance(output, dict) else output
        if trial.trains and module.automatic_optimization and isinstance(loss, Tensor):
            if loss.numel() != 1:  # which is refused by name
                raise Cannot(f"training_step returned a loss of shape {tuple(loss.shape)}")
            here.tape.log(RETURNED, loss)
            self.backward(loss)

    @override
    def meet(self, part: int, where: str, value: Any, combine: Combine) -> Any:
        if self._trial.goes_on:
            raise PartsDiffer(
                f"{self._trial.name}: training_step needs the rows of all micro-batches at once, which run one "
                "after the other. Set num_microbatches=1."
            )
        state = self._states.get(part, nullcontext())
        state.__exit__(None, None, None)
        try:
            return super().meet(part, where, value, combine)
        finally:
            state.__enter__()


class _Silent(DummyLogger):
    """Stands for a logger, and writes nothing; `self.logger.experiment` takes any call."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self._own = own

    name: Any = property(lambda self: self._own.name)
    version: Any = property(lambda self: self._own.version)
    save_dir: Any = property(lambda self: self._own.save_dir)
    log_dir: Any = property(lambda self: self._own.log_dir)


class _Watch(TorchDispatchMode):
    """Refuses collectives of one rank alone, and notes submodules of which parameters are used outside their forward.

    All may be in a backward pass of the step's own.
    """

    def __init__(self, trial: Trial, ran: Ran) -> None:
        super().__init__()
        self._trial, self._ran = trial, ran
        self._owners = {
            parameter.untyped_storage().data_ptr(): [".".join(path[:i]) for i in range(1, len(path))]
            for name, parameter in trial.module.named_parameters()
            if trial.sees_calls and is_plain(parameter) and (path := name.split("."))
        }

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._trial.together and func.namespace in ("c10d", "_c10d_functional"):
            raise Cannot("training_step communicates with other ranks")
        sees, outside = self._trial.sees_calls, self._ran.outside
        if sees and torch._C._current_graph_task_id() >= 0:
            outside.update(name for name, _ in self._trial.module.named_modules())
        for one in (
            tree_leaves((args, kwargs)) if sees and torch.is_grad_enabled() else ()
        ):  # else elements of shards do
            if isinstance(one, Tensor) and is_plain(one) and one.layout is torch.strided:
                owners = self._owners.get(one.untyped_storage().data_ptr(), ())
                outside.update(name for name in owners if name not in self._ran.open)
        return func(*args, **(kwargs or {}))

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True


def _refuse_to_read(strategy: str, _: nn.Parameter) -> Any:
    raise PartsDiffer(
        f"{strategy}: training_step reads the .grad of a parameter, which isn't the whole batch's. Read it in "
        "on_before_optimizer_step."
    )


def _mean_loss(steps: Sequence[Ran], values: Sequence[Any], parts: Sequence[int]) -> Any:
    """The mean of the losses of parts, if values are these."""
    pairs = zip(values, (steps[part].losses for part in parts), strict=True)
    if len(parts) < len(steps) or not all(any(is_loss(value, loss) for loss in losses) for value, losses in pairs):
        return None
    return combine(values, [step.num for step in steps])


def _hooks(module: nn.Module) -> list[int]:
    """The numbers of the hooks of a module, of those in it, and of its parameters."""
    owners = (*module.modules(), *module.parameters())
    return [number for owner in owners for hooks in hooks_of(owner) for number in hooks if isinstance(number, int)]


def _evaluates(module: nn.Module, what: int) -> bool:
    """Whether a layer is put in evaluation mode, see `Trial`."""
    if isinstance(module, nn.RNNBase):
        return what == 2 or module.dropout > 0
    is_of_others = not type(module).__module__.startswith("torch.")
    return what == 2 or isinstance(module, _DRAWING) or (what == 1 and is_of_others and not any(module.children()))


def _leaves_out(loss: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a parameter takes no part in a loss, as far as its graph shows."""
    reached = set[int]()
    for node in graph(loss):
        if "CheckpointFunction" in node.name():  # reentrant: hides what it computes
            return False
        variable = getattr(node, "variable", None)
        reached |= {id(variable), id(getattr(variable, "shard", None))}  # a gathered parameter has one
    return any(id(p) not in reached for p in parameters)


def _hold_optimizers(module: pl.LightningModule, backward: Callable[..., None]) -> None:
    """Have `manual_backward` note its losses, and optimizers and schedulers do nothing, in this state of a module."""
    strategy: Any = module.trainer.strategy
    optimizers, configs, held = strategy.optimizers, strategy.lr_scheduler_configs, ["clip_gradients"]
    if not optimizers:  # before the strategy makes them
        optimizers, configs = _init_optimizers_and_lr_schedulers(module)
        held += ["toggle_optimizer", "untoggle_optimizer"]
    answers: dict[str, Any] = dict.fromkeys(held)
    for name, own in ("optimizers", optimizers), ("lr_schedulers", [config.scheduler for config in configs]):
        still = [_Still(one) for one in own]
        answers[name] = still[0] if len(still) == 1 else still or None
    calls = {name: partial(_answered, answer) for name, answer in answers.items()}
    vars(module).update(calls, manual_backward=backward)


def _answered(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


class _Still:
    """An optimizer, or a scheduler, that never steps, and keeps gradients; everything else is its own."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.zero_grad, self.toggle_model = partial(_answered, None), partial(_answered, nullcontext())

    def step(self, closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
        """Call the closure, as an optimizer does."""
        return closure() if callable(closure) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
