"""Decide once what a step calls, and fetch and move its batches, at the cost of a hand-written loop.

Only hooks that are overridden are called. They are looked up at an epoch's start, after a validation, when the list of
callbacks changes, and every `log_every_n_steps` batches (at least 10): one that is set meanwhile counts from there on.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, cast

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar
from pytorch_lightning.loops import fetchers
from pytorch_lightning.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.combined_loader import CombinedLoader, _MaxSizeCycle, _Sequential
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from ...strategies import SingleDeviceStrategy
from ...strategies.batch.one_process import OneProcessStrategy
from ...strategies.core.loop_contract import NothingToDo
from ...strategies.core.transfers import from_host
from ...strategies.core.types import Batch
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import contract_of
from ..checkpoint import next_of

TESTED = ("2.13", "2.14", "2.15")
"""Minor versions of torch that the lean steps were tested with; another Lightning is refused."""


@cache
def is_tested(version: str) -> bool:
    """Whether the lean steps were tested with torch's version; the warning appears once."""
    tested = ".".join(version.split(".")[:2]) in TESTED
    if not tested:
        rank_zero_warn(
            f"Evener's lean steps were not tested with torch {version} (tested: {', '.join(TESTED)}). Lightning's own "
            "loops run instead, which are slower; Trainer(lean=True) takes the lean steps."
        )
    return tested


_OURS = (SingleDeviceStrategy, OneProcessStrategy, RankStrategy)  # any other is called as Lightning calls it
_AS_IMPORTED: dict[type, dict[str, Any]] = {
    cls: {name: getattr(cls, name) for name in dir(cls)}
    for cls in (
        pl.Callback, ModelCheckpoint, pl.LightningModule, pl.LightningDataModule, Strategy, Precision, MixedPrecision,
        PassThroughProfiler, *_OURS,
    )
}  # fmt: skip
"""The attributes of classes before anything was patched."""


def overridden(obj: object, base: type, *names: str) -> bool:
    """Whether something other than the base's would run for one of the names: a subclass's, or an instance's."""
    own, known = vars(obj), _AS_IMPORTED[base]
    return any(name in own or getattr(type(obj), name, None) is not known[name] for name in names)


def may_be_lean(trainer: Any, fetcher: _DataFetcher) -> bool:
    """Whether steps may be lean, and no profiler and no debug log would record what is not called."""
    silent = not overridden(trainer.profiler, PassThroughProfiler, "start", "stop", "profile")
    if not trainer.lean or not silent or call.log.isEnabledFor(10):
        return False
    fetcher._start_profiler = fetcher._stop_profiler = fetchers._profile_nothing
    return not isinstance(fetcher, _DataLoaderIterDataFetcher)


REFRESH_S = 0.1
"""Seconds between two refreshes of a bar. A refresh costs as much as several tiny training steps."""


class TimedBar:
    """Draws a progress bar after a batch if `REFRESH_S` seconds have passed, or the batch is the loader's last."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self._due_s = 0.0

    def draw(self, trains: bool, own: Callable[..., Any], trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        """Call a hook of the bar, which reads neither batch nor outputs, if it is time to."""
        _, batch_idx, *loader = args
        if trains:
            loop = trainer.fit_loop
            is_last = batch_idx + 1 >= loop.max_batches or loop.epoch_loop.batch_progress.is_last_batch
        else:
            is_last = batch_idx + 1 >= trainer._active_loop.max_batches[loader[0] if loader else 0]
        if is_last or time.perf_counter() >= self._due_s:
            own(trainer, module, outputs, *args)
            self._due_s = time.perf_counter() + REFRESH_S


_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class StepPlan:
    """What a step calls: the loader, the move to the device, the hooks that are overridden, and the module's step."""

    def __init__(self, trainer: Any, fetcher: _DataFetcher, step_name: str, hooks: Iterable[str]) -> None:
        self.trainer, self.strategy, self.module = trainer, trainer.strategy, trainer.lightning_module
        self.state: dict[str, Any] = vars(self.module)
        self.step_name, self.hooks = step_name, tuple(hooks)
        self.loader = OneLoader.of(fetcher)
        self.resolve()

    def resolve(self) -> None:
        """Make all choices, at first and to pick up later changes."""
        trainer, strategy, module, name = self.trainer, self.strategy, self.module, self.step_name
        self.callbacks: list[pl.Callback] = list(trainer.callbacks)
        self.model, self.precision, self.contract = strategy._model, trainer.precision_plugin, contract_of(strategy)
        self.work = {hook: work for hook in self.hooks if any(work := self._work(hook))}
        self.move = self._mover()
        context = f"{name.replace('training', 'train').replace('validation', 'val')}_context"
        # a step that only calls the module's, without a wrapper, autocast or a conversion
        plain = not overridden(strategy, Strategy, name) and strategy.model is module
        plain |= self.keeps_contract(name) and self.contract.runs_alone(name)
        plain &= not overridden(self.precision, Precision, context, "forward_context")
        self.step: Callable[..., Any] = getattr(module if plain else strategy, name)
        self.takes_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)

    def keeps_contract(self, *names: str) -> bool:
        """Whether methods of the strategy do Lightning's part and the contract's, and nothing else."""
        base = next((cls for cls in _OURS if isinstance(self.strategy, cls)), None)
        return base is not None and not overridden(self.strategy, base, *names)

    def stale(self) -> bool:
        """Whether callbacks were added or removed, or the module's wrapper was replaced."""
        return self.trainer.callbacks != self.callbacks or self.strategy._model is not self.model

    def _work(self, name: str) -> tuple[list[Callable[..., Any]], Callable[..., Any] | None]:
        """A hook of the callbacks and of the module, where it is overridden and not set to None."""
        found, bar = list[Callable[..., Any]](), self.trainer.timed_bar
        for callback in self.callbacks:
            hook = getattr(callback, name)
            if not overridden(callback, pl.Callback, name) or not callable(hook) or _is_idle(callback, name):
                continue
            if bar is not None and bar.bar is callback and name.endswith("_batch_end"):
                hook = partial(bar.draw, name == "on_train_batch_end", hook)
            found.append(hook)
        own = getattr(self.module, name)
        return found, own if overridden(self.module, pl.LightningModule, name) and callable(own) else None

    def call(self, name: str, *args: Any) -> Any:
        """Call a hook in `work`, the callbacks' with trainer and module first; returns what the module's does."""
        hooks, own = self.work[name]
        state, trainer, module = self.state, self.trainer, self.module
        before = state["_current_fx_name"]  # which `self.log` reads; nn.Module.__setattr__ costs about 30 times as much
        state["_current_fx_name"] = name
        for hook in hooks:
            hook(trainer, module, *args)
        output = None
        if own is not None:
            state["_current_fx_name"] = name  # a callback may have changed it
            output = own(*args)
        state["_current_fx_name"] = before
        return output

    def call_as(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function so that `self.log` treats it as the hook `name`."""
        before = self.state["_current_fx_name"]
        self.state["_current_fx_name"] = name
        try:
            output = function(*args)
        except StopIteration as exc:
            raise RuntimeError(
                f"{name} raised StopIteration, which would end the epoch without a word. Give next() a default, or "
                "begin the iterator again."
            ) from exc
        self.state["_current_fx_name"] = before
        return output

    def _mover(self) -> Callable[[Batch, int], Batch]:
        """Choose how a batch is moved to the device: a function of (batch, dataloader_idx)."""
        module, data, strategy, contract = self.module, self.trainer.datamodule, self.strategy, self.contract
        own = ("_on_before_batch_transfer", "_apply_batch_transfer_handler", "_call_batch_hook")
        if (
            not self.keeps_contract("batch_to_device")
            or overridden(module, pl.LightningModule, *_TRANSFER, *own)
            or (data is not None and overridden(data, pl.LightningDataModule, *_TRANSFER))
            or overridden(self.precision, Precision, "convert_input")
        ):
            return self._convert_and_move
        device = contract.meeting_device or strategy.root_device
        move: Callable[[Batch, int], Batch] = to_cpu
        if device.type != "cpu":
            move = lambda batch, _: from_host(batch, device)  # noqa: E731  # one of two
        if isinstance(contract, NothingToDo):
            return move

        def begin_and_move(batch: Batch, dataloader_idx: int) -> Batch:
            contract.begin_batch(dataloader_idx)
            return move(batch, dataloader_idx)

        return begin_and_move

    def _convert_and_move(self, batch: Batch, dataloader_idx: int) -> Batch:
        batch = self.precision.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        move = partial(self.strategy.batch_to_device, dataloader_idx=dataloader_idx)
        return self.call_as("batch_to_device", move, batch)


def _is_idle(callback: pl.Callback, name: str) -> bool:
    """Whether a hook is that of Lightning's `ModelCheckpoint`, with nothing to do at the end of a batch."""
    return (
        name == "on_train_batch_end"
        and isinstance(callback, ModelCheckpoint)
        and not overridden(callback, ModelCheckpoint, name)
        and callback._every_n_train_steps < 1
        and callback._train_time_interval is None
    )


class OneLoader:
    """Iterate over a single sized loader without Lightning's machinery, whose counters are kept up to date."""

    def __init__(self, fetcher: _DataFetcher) -> None:
        self.fetcher = fetcher
        self.combined: Any = fetcher.combined_loader._iterator
        self._next: Callable[[], Batch] = next_of(self.combined.iterators[0])

    @classmethod
    def of(cls, fetcher: _DataFetcher) -> "OneLoader | None":
        """That of a fetcher; None unless it reads one loader of known length."""
        combined: Any = fetcher._combined_loader
        fits = (
            type(fetcher) is _PrefetchDataFetcher
            and fetcher.length is not None
            and type(combined) is CombinedLoader
            and type(iterator := cast(Any, combined._iterator)) in (_MaxSizeCycle, _Sequential)
            and len(iterator.iterables) == len(iterator.iterators) == 1
            and combined._spec.num_nodes == 1
        )
        return cls(fetcher) if fits else None

    def __next__(self) -> Batch:
        fetcher = self.fetcher
        try:
            batch = self._next()
        except StopIteration:
            fetcher.done = True
            raise
        self.combined._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length  # pyright: ignore[reportOperatorIssue]  # its length is known
        return batch


def to_cpu(batch: Batch, dataloader_idx: int = 0) -> Batch:
    """Move a batch, or predictions, to the CPU."""
    kind = type(batch)
    if kind is Tensor and batch.is_cpu:
        return batch
    if kind is list or kind is tuple:
        for item in batch:
            if type(item) is not Tensor or not item.is_cpu:
                break
        else:
            return kind(batch)
    return move_data_to_device(batch, torch.device("cpu"))
