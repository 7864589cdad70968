"""Which hooks exist: resolved once, checked cheaply before every step, called in Lightning's order.

Lightning calls every hook of every callback and of the module in every step, most of them empty. A `HookPlan` knows
which of them somebody has defined, on a class or on an instance, and calls only those, with `_current_fx_name` (by
which `self.log` knows where it is) as Lightning sets it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins import Precision as FabricPrecision
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar, Timer, TQDMProgressBar
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer import call

from .progress_bar import TimedBar

Base = Mapping[str, Any]


def public_and_private(*classes: type) -> Base:
    """Everything that a class offers, as it was when this file was imported, before anything was patched."""
    return {name: getattr(cls, name) for cls in classes for name in dir(cls)}


CALLBACK = public_and_private(pl.Callback)
MODULE = public_and_private(pl.LightningModule)
DATA_MODULE = public_and_private(pl.LightningDataModule)
STRATEGY = public_and_private(Strategy)
PRECISION = public_and_private(FabricPrecision, Precision)
PROFILER = public_and_private(PassThroughProfiler)


def overridden(obj: object, name: str, base: Base) -> bool:
    """Whether anything but Lightning's own default would run: a subclass's method, or an attribute of the object."""
    return name in getattr(obj, "__dict__", ()) or getattr(type(obj), name, None) is not base[name]


def any_overridden(obj: object, names: Iterable[str], base: Base) -> bool:
    """Whether at least one of the names is overridden."""
    return any(overridden(obj, name, base) for name in names)


def profiles_nothing(trainer: Any) -> bool:
    """Whether neither a profiler nor a debug log would notice that a hook was not called."""
    profiler = trainer.profiler
    silent = not any_overridden(profiler, ("start", "stop", "profile"), PROFILER)
    return silent and not call.log.isEnabledFor(10)


def namespaces(obj: object, *bases: type) -> Iterator[Mapping[str, Any]]:
    """The dictionaries in which an attribute of the object can appear: its own and those of its classes."""
    yield getattr(obj, "__dict__", {})
    for cls in type(obj).__mro__:
        if cls in bases or cls is object:
            return
        yield vars(cls)


class HookPlan:
    """The hooks of a loop, resolved from module, callbacks, strategy and precision plugin.

    Args:
        trainer: the trainer, with module and strategy connected.
        hooks: names of the hooks that the loop calls in every step.
        timed_bar: the progress bar that the trainer itself made, to be refreshed by time; or None.
    """

    def __init__(self, trainer: pl.Trainer, hooks: Iterable[str], timed_bar: TimedBar | None = None) -> None:
        self.trainer: Any = trainer
        self.strategy = trainer.strategy
        self.module = trainer.lightning_module
        self.state: dict[str, Any] = self.module.__dict__
        self.hooks = tuple(hooks)
        self.timed_bar = timed_bar
        self.resolve()

    def resolve(self) -> None:
        """Look again at everything; what was defined meanwhile counts from now on."""
        trainer = self.trainer
        self.callbacks = list(trainer.callbacks)
        self.precision = trainer.precision_plugin
        self.profiler = trainer.profiler
        self.model: Any = trainer.strategy._model
        self.work = {name: work for name in self.hooks if (work := self._work(name)) is not None}
        self._spaces = list(self._namespaces())
        self._size = sum(map(len, self._spaces))

    def stale(self) -> bool:
        """Whether callbacks came or went, or an attribute of anything that is called was set or removed."""
        trainer = self.trainer
        return (
            sum(map(len, self._spaces)) != self._size
            or trainer.callbacks != self.callbacks
            or trainer.profiler is not self.profiler
            or self.strategy._model is not self.model
        )

    def _namespaces(self) -> Iterator[Mapping[str, Any]]:
        yield from namespaces(self.module, pl.LightningModule)
        yield from namespaces(self.strategy, Strategy)
        yield from namespaces(self.precision, Precision)
        yield self.profiler.__dict__
        for callback in self.callbacks:
            yield from namespaces(callback, pl.Callback)

    def _work(self, name: str) -> tuple[list[Any], bool] | None:
        """Who has something to do in a hook: the callbacks, and whether the module. None where nobody has."""
        bar = self.timed_bar
        targets = [cb for cb in self.callbacks if name not in CALLBACK or overridden(cb, name, CALLBACK)]
        if name == "on_train_batch_end":
            targets = [cb for cb in targets if not _saves_at_epochs_only(cb)]
        if bar is not None and hasattr(bar, name):
            targets = [bar if cb is bar.bar else cb for cb in targets]
        in_module = overridden(self.module, name, MODULE)
        return (targets, in_module) if targets or in_module else None

    def call(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks, then of the module.

        Args:
            name: of the hook.
            *args: what the module's hook receives; callbacks receive trainer and module before them.

        Returns:
            What the module's hook returned; None where the module does not define it.
        """
        work = self.work.get(name)
        if work is None:
            return None
        targets, in_module = work
        state, trainer, module = self.state, self.trainer, self.module
        before = state["_current_fx_name"]
        state["_current_fx_name"] = name
        for target in targets:
            hook = getattr(target, name)
            if callable(hook):
                hook(trainer, module, *args)
        output = None
        if in_module and callable(hook := getattr(module, name)):
            # a callback may have changed it; nn.Module.__setattr__ is some 30 times the price of this
            state["_current_fx_name"] = name
            output = hook(*args)
        state["_current_fx_name"] = before
        return output

    def call_as(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call any function while `self.log` takes it for the hook `name`."""
        before = self.state["_current_fx_name"]
        self.state["_current_fx_name"] = name
        output = function(*args, **kwargs)
        self.state["_current_fx_name"] = before
        return output

    def step_is_the_modules(self, step: str) -> bool:
        """Whether the strategy's step would only call the module's, without a wrapper, autocast or a conversion."""
        context = f"{step.replace('training', 'train').replace('validation', 'val')}_context"
        return (
            not overridden(self.strategy, step, STRATEGY)
            and not any_overridden(self.precision, (context, "forward_context"), PRECISION)
            and self.strategy.model is self.module
        )

    def reads_outputs(self) -> bool:
        """Whether anybody but Lightning's own callbacks, known to ignore it, sees what `training_step` returned."""
        targets, in_module = self.work.get("on_train_batch_end", ([], False))
        return in_module or any(not _ignores_outputs(target) for target in targets)


def _ignores_outputs(target: object) -> bool:
    hook = getattr(type(target), "on_train_batch_end", None)
    known = isinstance(target, TimedBar) or hook in _KNOWN_TO_IGNORE_OUTPUTS
    return known and "on_train_batch_end" not in getattr(target, "__dict__", ())


_KNOWN_TO_IGNORE_OUTPUTS: frozenset[Any] = frozenset(
    cls.on_train_batch_end for cls in (ModelCheckpoint, TQDMProgressBar, RichProgressBar, Timer)
)


def _saves_at_epochs_only(callback: Any) -> bool:
    """Whether this is Lightning's `ModelCheckpoint`, with options under which it does nothing after a batch."""
    return (
        isinstance(callback, ModelCheckpoint)
        and not overridden(callback, "on_train_batch_end", {"on_train_batch_end": ModelCheckpoint.on_train_batch_end})
        and callback._every_n_train_steps < 1
        and callback._train_time_interval is None
    )
