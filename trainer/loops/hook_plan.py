"""Resolve which hooks are overridden, and call them in Lightning's order.

Lightning calls every hook of every callback and of the module in every step, most of them empty. A `HookPlan` records
which of them are overridden, on a class or on an instance, and calls only those. It is resolved at the start of an
epoch, after a validation, when the list of callbacks changes, and every `log_every_n_steps` batches (at least 10): a
hook that is set on an object or a class meanwhile counts from there on. It sets `_current_fx_name` as Lightning does,
since `self.log` reads it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import Precision as FabricPrecision
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from ...strategies import SingleDeviceStrategy
from ...strategies.batch.one_process import OneProcessStrategy
from ...strategies.core.loop_contract import StepContract
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import contract_of

TESTED = {"torch": ("2.13", "2.14", "2.15"), "Lightning": ("2.6",)}
"""Minor versions that the lean steps were tested with."""


def is_lean(asked: bool | None) -> bool:
    """Whether to take lean steps: as asked, or by the installed versions if None."""
    return _is_tested(torch.__version__, pl.__version__) if asked is None else asked


@cache
def _is_tested(torchs: str, lightnings: str) -> bool:
    """Whether both versions were tested; the warning appears once."""
    installed = {"torch": torchs, "Lightning": lightnings}
    untested = [
        f"{name} {version} (tested: {', '.join(TESTED[name])})"
        for name, version in installed.items()
        if ".".join(version.split(".")[:2]) not in TESTED[name]
    ]
    if untested:
        rank_zero_warn(
            f"Evener's lean steps were not tested with {' and '.join(untested)}. Lightning's own loops run instead, "
            "which are slower; Trainer(lean=True) takes the lean steps."
        )
    return not untested


REFRESH_S = 0.1
"""Seconds between two refreshes. A refresh costs as much as several tiny training steps."""


_BARS = {
    "train": "train_progress_bar", "validation": "val_progress_bar", "test": "test_progress_bar",
    "predict": "predict_progress_bar",
}  # fmt: skip
"""The bars of tqdm, by the stage in the names of hooks."""


class TimedBar:
    """Replaces a progress bar in a loop's `*_batch_end` hooks.

    The last batch is always shown. Batch and outputs are not kept: Lightning's bars read neither.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self._due_s = 0.0
        for stage in _BARS:
            setattr(self, f"on_{stage}_batch_end", partial(self._end_batch, stage))

    def _end_batch(self, stage: str, trainer: Any, module: Any, *args: Any) -> None:
        """Refresh if the interval is over or this is the loader's last batch."""
        num = args[2] + 1
        if stage == "train":
            loop = trainer.fit_loop
            last = num >= loop.max_batches or loop.epoch_loop.batch_progress.is_last_batch
        else:
            last = num >= trainer._active_loop.max_batches[next(iter(args[3:]), 0)]
        if last or time.perf_counter() >= self._due_s:
            getattr(self.bar, f"on_{stage}_batch_end")(trainer, module, *args)
            self._due_s = time.perf_counter() + REFRESH_S
        elif isinstance(self.bar, TQDMProgressBar):  # which shows its number of batches when it is drawn again
            getattr(self.bar, _BARS[stage]).n = num


Base = Mapping[str, Any]


def public_and_private(*classes: type) -> Base:
    """The attributes of classes as they were when this file was imported, before anything was patched."""
    return {name: getattr(cls, name) for cls in classes for name in dir(cls)}


CALLBACK = public_and_private(pl.Callback)
CHECKPOINT = public_and_private(ModelCheckpoint)
MODULE = public_and_private(pl.LightningModule)
DATA_MODULE = public_and_private(pl.LightningDataModule)
STRATEGY = public_and_private(Strategy)
PRECISION = public_and_private(FabricPrecision, Precision)
PROFILER = public_and_private(PassThroughProfiler)
OWN = {cls: public_and_private(cls) for cls in (SingleDeviceStrategy, OneProcessStrategy, RankStrategy)}
"""The strategies whose methods the loops know; any other strategy is called as Lightning calls it."""


def overridden(obj: object, name: str, base: Base) -> bool:
    """Whether something other than Lightning's default would run: a subclass's method or an instance attribute."""
    return name in getattr(obj, "__dict__", ()) or getattr(type(obj), name, None) is not base[name]


def any_overridden(obj: object, names: Iterable[str], base: Base) -> bool:
    """Whether at least one of the names is overridden."""
    return any(overridden(obj, name, base) for name in names)


def may_be_lean(trainer: Any) -> bool:
    """Whether steps may be lean, and no profiler and no debug log would record the hooks that are not called."""
    if not trainer.lean:
        return False
    profiler = trainer.profiler
    silent = not any_overridden(profiler, ("start", "stop", "profile"), PROFILER)
    return silent and not call.log.isEnabledFor(10)


class HookPlan:
    """The hooks of a loop, resolved from module, callbacks, strategy and precision plugin.

    Args:
        hooks: names of the hooks that the loop calls in every step.
    """

    def __init__(self, trainer: pl.Trainer, hooks: Iterable[str]) -> None:
        self.trainer: Any = trainer
        self.strategy = trainer.strategy
        self.module = trainer.lightning_module
        self.state: dict[str, Any] = self.module.__dict__
        self.hooks = tuple(hooks)
        self.timed_bar: TimedBar | None = getattr(trainer, "timed_bar", None)

    def resolve(self) -> None:
        """Resolve all hooks, at first and to pick up later changes."""
        trainer = self.trainer
        self.callbacks = list(trainer.callbacks)
        self.precision = trainer.precision_plugin
        self.model: Any = trainer.strategy._model
        self.work = {name: work for name in self.hooks if (work := self._work(name)) is not None}

    @property
    def contract(self) -> StepContract:
        """What the strategy does in a step beside Lightning's part."""
        return contract_of(self.strategy)

    def keeps_contract(self, *names: str) -> bool:
        """Whether methods of the strategy do Lightning's part and the contract's, and nothing else."""
        known = next((base for cls, base in OWN.items() if isinstance(self.strategy, cls)), None)
        return known is not None and not any_overridden(self.strategy, names, known)

    def stale(self) -> bool:
        """Whether callbacks were added or removed, or the module's wrapper was replaced."""
        return self.trainer.callbacks != self.callbacks or self.strategy._model is not self.model

    def _work(self, name: str) -> tuple[list[Any], bool] | None:
        """The callbacks that override a hook, and whether the module does; None if nothing overrides it."""
        bar = self.timed_bar
        targets = [cb for cb in self.callbacks if overridden(cb, name, CALLBACK)]
        if name == "on_train_batch_end":
            targets = [cb for cb in targets if not _saves_at_epochs_only(cb)]
        if bar is not None and hasattr(bar, name):
            targets = [bar if cb is bar.bar else cb for cb in targets]
        in_module = overridden(self.module, name, MODULE)
        return (targets, in_module) if targets or in_module else None

    def call(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks, which get trainer and module first, then of the module; return its output."""
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
            # a callback may have changed it; nn.Module.__setattr__ costs about 30 times as much
            state["_current_fx_name"] = name
            output = hook(*args)
        state["_current_fx_name"] = before
        return output

    def call_as(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function so that `self.log` treats it as the hook `name`.

        Raises:
            RuntimeError: it has raised StopIteration, which the loop would take for the end of its loader.
        """
        before = self.state["_current_fx_name"]
        self.state["_current_fx_name"] = name
        try:
            output = function(*args, **kwargs)
        except StopIteration as exc:
            raise RuntimeError(
                f"{name} raised StopIteration, which would end the epoch without a word. Give next() a default, or "
                "begin the iterator again."
            ) from exc
        self.state["_current_fx_name"] = before
        return output

    def step_is_the_modules(self, step: str) -> bool:
        """Whether the strategy's step only calls the module's, without a wrapper, autocast or a conversion."""
        context = f"{step.replace('training', 'train').replace('validation', 'val')}_context"
        plain = not overridden(self.strategy, step, STRATEGY) and self.strategy.model is self.module
        alone = self.keeps_contract(step) and self.contract.runs_alone(step)
        return (plain or alone) and not any_overridden(self.precision, (context, "forward_context"), PRECISION)

    def reads_outputs(self) -> bool:
        """Whether anyone may read the output of `training_step`; the default progress bar does not."""
        targets, in_module = self.work.get("on_train_batch_end", ([], False))
        return in_module or any(target is not self.timed_bar for target in targets)


def _saves_at_epochs_only(callback: Any) -> bool:
    """Whether a callback is Lightning's `ModelCheckpoint` with nothing to do at the end of a batch."""
    return (
        isinstance(callback, ModelCheckpoint)
        and not overridden(callback, "on_train_batch_end", CHECKPOINT)
        and callback._every_n_train_steps < 1
        and callback._train_time_interval is None
    )
