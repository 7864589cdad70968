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
from ...core.patching import Replacement, hooks_of, kept_metrics, replaced
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
    """What a step of the module has done.

    Args:
        losses: with their graphs; in manual optimization of each call of `manual_backward`.
        unused: whether a parameter that is trained took no part in a loss.
        weight: the `loss_weight` that it returned.
        written: what it has changed in the module, by name.
        given: of the first part, what metrics were given of all, and which arguments are `rows` of samples.
        output: what it returned.
        appended: what it has appended to lists of the module.
        open: names of the submodules in whose forward it is.
        outside: submodules of which it has used parameters outside of their forward.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    unused: bool = False
    weight: Any = None
    written: dict[str, Written] = field(default_factory=dict[str, Written])
    given: dict[Any, Any] = field(default_factory=dict[Any, Any])
    rows: set[Any] = field(default_factory=set[Any])
    output: Any = None
    appended: Appended = field(default_factory=Appended)
    open: list[str] = field(default_factory=list[str])
    outside: set[str] = field(default_factory=set[str])


@dataclass
class Trial:
    """Runs a step of a module.

    Args:
        step: name of the module's method.
        device: where it expects its batch.
        strategy: name that begins messages.
        together: whether all ranks run it, whose steps are exchanges.
        evaluates: what is in evaluation mode: 0 for layers of torch that draw random numbers, 1 for those of others,
            too, that hold no layers, 2 for all of the module.
        in_turn: whether chunks run one after the other in training, each in the module as the one before has left it.
        sees_calls: whether it is noted where the parameters of submodules are used.
        rest: arguments of the step after the batch.
        of_ranks: whether parts are those of ranks; else chunks.
    """

    module: pl.LightningModule
    step: str
    device: torch.device
    strategy: str
    together: bool
    evaluates: int
    in_turn: bool = False
    sees_calls: bool = False
    rest: Sequence[Any] = ()
    of_ranks: bool = False

    @property
    def trains(self) -> bool:
        """Whether it is the step of training."""
        return self.step == "training_step"

    @property
    def goes_on(self) -> bool:
        """Whether a part finds the module as the part before has left it."""
        return self.in_turn and not self.of_ranks

    def run(self, batch: MakesBatch, *places: int, seed: int = 1, given: Sequence[Written] = ()) -> list[Ran]:
        """Run the step on the samples between each two places, as parts that may meet.

        Args:
            given: what the module is given first.
        """
        module = self.module
        pairs = list(itertools.pairwise(places))
        batches, sizes = [batch(i, j) for i, j in pairs], [j - i for i, j in pairs]
        with ExitStack() as stack:
            stack.enter_context(seeded(seed, self.device))
            state = ModuleState(module)
            stack.callback(state.restore)
            stack.enter_context(kept_metrics(module))
            trainer: Any = module.trainer
            stack.enter_context(replaced(trainer, "_loggers", [_Silent(own) for own in trainer._loggers]))
            stack.enter_context(torch.set_grad_enabled(self.trains))
            for part in module.modules():
                part.training = part.training and not _evaluates(part, self.evaluates)
            parts = _Parts(self, batches, sizes, state)
            stack.enter_context(received((module_log(part), parts.log) for part in lightning_modules(module)))
            if self.sees_calls:
                stack.callback(register_module_forward_pre_hook(parts.enter).remove)
                stack.callback(register_module_forward_hook(parts.leave, always_call=True).remove)
            if not self.together:
                stack.enter_context(simulating(SimulatedRanks(len(sizes) if self.of_ranks else 1)))
            for one in given:
                one.put()
            if not module.automatic_optimization:
                _hold_optimizers(module, parts.backward, stack)
            metrics = PartMetrics(module, [self.device] * len(sizes), self.strategy, parts.number)
            stack.callback(metrics.close)
            recording = nullcontext() if self.of_ranks else metrics.recording(sizes, notes=True)
            unread = property(partial(_refuse_to_read, self.strategy), getattr(Tensor.grad, "__set__"))  # noqa: B009
            is_read = not self.trains or self.of_ranks or not module.automatic_optimization
            with recording, parts, nullcontext() if is_read else replaced(nn.Parameter, "grad", unread):
                for piece in parts.pieces:
                    piece.call()
            found = parts.found
            if not (self.of_ranks or self.together):  # chunks share what they have drawn of
                left = state.taken()
                for one in found:
                    one.written.update(left)
            found[0].given, found[0].rows = metrics.replay(partial(_mean_loss, found)), metrics.rows
        return found


class _Parts(Meeting):
    """Parts that run, and meet, in one module as in one of each: what one has written to it is put aside meanwhile.

    Attributes:
        found: what each has done.
    """

    def __init__(self, trial: Trial, batches: Sequence[Batch], sizes: Sequence[int], state: ModuleState) -> None:
        pieces = zip(sizes, batches, strict=True)
        super().__init__([Piece(trial.device, f"{num} samples", partial(self._step, one)) for num, one in pieces])
        self._trial, self._state = trial, state
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
        self._here.open.append(self._names.get(part, ""))

    def leave(self, *_: Any) -> None:
        """Note that its call has ended."""
        self._here.open.pop()

    def backward(self, loss: Tensor) -> None:
        """Note a loss that goes backward."""
        self._here.losses.append(loss)
        self._here.unused |= _leaves_out(loss, self._trained)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Note what is logged as a mean."""
        options.update(zip(LOG_OPTIONS, args, strict=False))
        if options.get("reduce_fx", "mean") in ("mean", torch.mean):
            self._here.tape.log(name, value, options.get("batch_size"))

    def _step(self, batch: Batch) -> None:
        trial, module, here = self._trial, self._trial.module, self._here
        lists = PartLists([vars(part) for part in lightning_modules(module)])
        uses = _Uses(module, here) if trial.sees_calls else nullcontext()
        with nullcontext() if trial.together else _OneRank(), uses, here.tape:
            output: Any = getattr(module, trial.step)(batch, *trial.rest)
        if not trial.of_ranks and self._hooks != _hooks(module):
            raise PartsDiffer(
                f"{trial.strategy}: {trial.step} registers or removes hooks, as each part of a batch would. Register "
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
        if not (trial.goes_on or (trial.together and trial.trains)):
            here.written.update(self._state.taken(draws=trial.of_ranks))

    @override
    def meet(self, part: int, where: str, value: Any, combine: Combine) -> Any:
        if self._trial.goes_on:
            raise PartsDiffer(
                f"{self._trial.strategy}: training_step needs the rows of all micro-batches at once, which run one "
                "after the other. Set num_microbatches=1."
            )
        written = {} if self._trial.together else self._state.taken(draws=self._trial.of_ranks)
        answer = super().meet(part, where, value, combine)
        for one in written.values():
            one.put()
        return answer


class _Silent(DummyLogger):
    """Stands for a logger, and writes nothing; `self.logger.experiment` takes any call."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self._own = own

    name: Any = property(lambda self: self._own.name)
    version: Any = property(lambda self: self._own.version)
    save_dir: Any = property(lambda self: self._own.save_dir)
    log_dir: Any = property(lambda self: self._own.log_dir)


class _OneRank(TorchDispatchMode):
    """Refuses collectives: only rank 0 computes."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise Cannot("training_step communicates with other ranks")
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


class _Uses(TorchDispatchMode):
    """Notes the submodules whose parameters a step uses outside of their forward, as all may be in its own backward."""

    def __init__(self, module: nn.Module, ran: Ran) -> None:
        super().__init__()
        self._ran, self._names = ran, [name for name, _ in module.named_modules()]
        self._owners = {
            parameter.untyped_storage().data_ptr(): [".".join(path[:i]) for i in range(1, len(path))]
            for name, parameter in module.named_parameters()
            if is_plain(parameter) and (path := name.split("."))
        }

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_graph_task_id() >= 0:
            self._ran.outside.update(self._names)
        for one in tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ():  # else elements of shards may do
            if isinstance(one, Tensor) and is_plain(one) and one.layout is torch.strided:
                owners = self._owners.get(one.untyped_storage().data_ptr(), ())
                self._ran.outside.update(name for name in owners if name not in self._ran.open)
        return func(*args, **(kwargs or {}))

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True


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


def _hold_optimizers(module: pl.LightningModule, backward: Callable[[Tensor], None], stack: ExitStack) -> None:
    """Have `manual_backward` note its losses, and optimizers and schedulers do nothing, inside a stack of contexts."""

    def manual_backward(_: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(loss)

    strategy: Any = module.trainer.strategy
    optimizers, configs = strategy.optimizers, strategy.lr_scheduler_configs
    still = partial(_answered, None)
    calls: dict[str, Callable[..., Any]] = {"manual_backward": manual_backward, "clip_gradients": still}
    if not optimizers:  # before the strategy makes them
        optimizers, configs = _init_optimizers_and_lr_schedulers(module)
        calls |= {"toggle_optimizer": still, "untoggle_optimizer": still}
    for name, own in ("optimizers", optimizers), ("lr_schedulers", [config.scheduler for config in configs]):
        answers = [_Still(one) for one in own]
        calls[name] = partial(_answered, answers[0] if len(answers) == 1 else answers or None)
    for name, call in calls.items():
        stack.callback(Replacement(module, name, call).remove)


def _answered(answer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what is known, in place of a method's result."""
    return answer


class _Still:
    """An optimizer, or a scheduler, that never steps."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Call the closure, as an optimizer does."""
        return closure() if callable(closure) else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Keep gradients."""

    def toggle_model(self, *args: Any, **kwargs: Any) -> Any:
        """Keep what requires gradients."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the optimizer's own."""
        return getattr(self._own, name)
