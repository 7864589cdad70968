"""Decide when checkpoints are saved, which are kept, and how they are named."""

import logging
import re
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from ...strategies import FSDPStrategy
from ...strategies.core.errors import ConfigError
from ...strategies.core.module_checks import has_nan
from ...strategies.core.options import Count, NotNegative, checked
from ...strategies.core.patching import replaced
from ...strategies.registry import processes_of
from .checkpoint_io import MemorySnapshots, VerifiedCheckpointIO
from .file_io import remove_leftovers

log = logging.getLogger(__name__)


class Checkpoint(ModelCheckpoint):
    """Save checkpoints during training: the best ones, the last one, or both.

    At most one trigger may be given; without any, a checkpoint is considered after every epoch. File names match
    `[A-Za-z0-9._-]+`, so that a path can be passed as a Hydra override and a metric named `val/loss` creates no
    directory.

    With this project's trainer a checkpoint is written between two batches or after the epoch, when validation, logging
    and all callbacks are done, so that it resumes exactly (`clean_points.py`). A best checkpoint is saved only with the
    weights that its score belongs to: a validation metric counts right after a validation. A state whose score is nan,
    or whose weights contain nan, is never one of the best; with `save_top_k=-1` its file is kept, and `last.ckpt` has
    it too.

    Args:
        dirpath: directory of the files. None takes the logger's, as Lightning does.
        filename: name without suffix; `{epoch}`, `{step}` and names of logged metrics in braces are replaced.
        monitor: name of the logged metric that ranks checkpoints; None keeps the newest instead.
        mode: `min` or `max`: whether lower or higher values of `monitor` are better.
        save_top_k: number of best files to keep; 0 keeps none, -1 keeps all.
        save_last: also keep `last.ckpt`, the most recently saved state.
        every_n_steps: number of optimizer steps between checkpoints.
        interval_s: seconds of training between checkpoints.
        snapshot_every_n_steps: number of optimizer steps between snapshots in memory, from which a run on one machine
            goes on that is restarted, if they are newer than its files.
        save_weights_only: omit the state that is only needed to resume.
        verbose: log a line for each checkpoint that is compared.
        background: write in a thread while training continues.
        sharded: every rank writes its shards (`strategy=fsdp`), instead of rank 0 the whole; any number of ranks,
            under any strategy, goes on from them.

    Raises:
        ConfigError: more than one trigger is given.
    """

    CHECKPOINT_EQUALS_CHAR = "_"

    best_epoch: int | None = None  # of the best checkpoint, from 0
    due = False  # whether a checkpoint must be written at the next clean point
    snapshots: MemorySnapshots | None = None  # takes those in memory, if any are taken
    _best_due = _validated = _told_of_nan = False
    _score_step = -1  # of the last validation that logged the monitored metric
    _last_batch_saved = -1
    _score_before: Tensor | None = None
    _io: VerifiedCheckpointIO | None = None

    @checked
    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "epoch{epoch:03d}-step{step:06d}",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_steps: Count | None = None,
        every_n_epochs: Count | None = None,
        interval_s: NotNegative | None = None,
        snapshot_every_n_steps: Count | None = None,
        save_weights_only: bool = False,
        verbose: bool = False,
        background: bool = False,
        sharded: bool = False,
    ) -> None:
        triggers = {"every_n_steps": every_n_steps, "every_n_epochs": every_n_epochs, "interval_s": interval_s}
        self._triggers = {name: value for name, value in triggers.items() if value is not None}
        self._key_triggers: dict[str, float] = {}
        if len(self._triggers) > 1:
            given = " and ".join(f"{name}={value}" for name, value in self._triggers.items())
            raise ConfigError(
                f"checkpoint: expected at most one trigger, got {given}. Set the others to null, or add a second "
                "Checkpoint callback."
            )
        super().__init__(
            dirpath=dirpath, filename=filename, monitor=monitor, mode=mode, save_top_k=save_top_k, save_last=save_last,
            every_n_train_steps=every_n_steps, every_n_epochs=every_n_epochs, save_weights_only=save_weights_only,
            train_time_interval=None if interval_s is None else timedelta(seconds=interval_s), verbose=verbose,
            auto_insert_metric_name=False,
        )  # fmt: skip
        self._interval = None if interval_s is None else Interval(interval_s)
        self._background, self._sharded = background, sharded
        self._snapshot_every_n_steps = snapshot_every_n_steps

    # When to save

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            # A resumed run continues in its own directory.
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if self._interval is not None:
            self._interval.start()
        strategy, every = trainer.strategy, self._snapshot_every_n_steps
        is_ours = type(strategy.checkpoint_io) in (TorchCheckpointIO, VerifiedCheckpointIO)
        if self._sharded and not (is_ours and isinstance(strategy, FSDPStrategy)):
            raise ConfigError(
                "checkpoint: sharded=true needs a strategy with shards, strategy=fsdp; got "
                f"{type(strategy).__name__} with {type(strategy.checkpoint_io).__name__}. Set "
                "checkpoint.sharded=false: each checkpoint is whole then."
            )
        if is_ours:
            self._io = strategy.checkpoint_io = VerifiedCheckpointIO(self._background, self._sharded)
        if self.dirpath is None:
            return
        if every is not None and trainer.num_nodes > 1:
            rank_zero_warn(
                f"checkpoint: snapshot_every_n_steps={every} has no effect on {trainer.num_nodes} machines: a machine "
                "that is lost takes its memory along. Save more often to the disk that they share (every_n_steps)."
            )
        elif every is not None:
            self.snapshots = MemorySnapshots(every, self.dirpath)
        if trainer.is_global_zero and Path(self.dirpath).is_dir():  # of an earlier run
            remove_leftovers(Path(self.dirpath))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        by_step = self._every_n_train_steps > 0 and step % self._every_n_train_steps == 0
        ends = self.save_last and step == trainer.max_steps  # possibly within an epoch
        by_time = self._interval is not None and self._interval.is_over(trainer)
        if by_time or ((by_step or ends) and step != self._last_global_step_saved):
            self._mark(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.monitor is not None and not trainer.sanity_checking:
            self._score_before = trainer.callback_metrics.get(self.monitor)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._validated = True
        score = None if self.monitor is None else trainer.callback_metrics.get(self.monitor)
        if score is not None and score is not self._score_before:
            self._score_step = trainer.global_step
        if self.monitor is not None and (self._best_due or self._epoch_counts(trainer)):
            self._mark(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epoch_counts(trainer):
            self._mark(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._io is not None:
            self._io.teardown()
        if self.snapshots is not None and self.save_last:
            self.snapshots.end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        for io in filter(None, (self._io, self.snapshots)):
            io.teardown()

    def lacks(self, trainer: pl.Trainer) -> bool:
        """Whether `last.ckpt` is requested and older than the weights and the gradients accumulated so far."""
        now = (trainer.global_step, trainer.fit_loop.epoch_loop.total_batch_idx)
        fresh = (self._last_global_step_saved, self._last_batch_saved) == now
        return bool(self.save_last) and not fresh and not trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]  # Lightning sets it undeclared

    def _mark(self, trainer: pl.Trainer) -> None:
        """Have a checkpoint written at the next clean point; Lightning's own trainer has none, and saves at once."""
        self.due = self._best_due = not trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]  # Lightning sets it undeclared
        at_once = self.due and not hasattr(trainer.fit_loop, "has_clean_points")
        if at_once and self._last_global_step_saved != trainer.global_step:
            self.save(trainer)

    def _epoch_counts(self, trainer: pl.Trainer) -> bool:
        return self._every_n_epochs > 0 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    # Saving

    def save(self, trainer: pl.Trainer) -> None:
        """Write the best checkpoint, if the monitored metric belongs to the current weights, and the last one.

        Raises:
            ConfigError: `monitor` was not logged by the end of the first validation.
        """
        self.due = False
        if self.snapshots is not None:
            self.snapshots.last_step = trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        self._last_batch_saved = loop.total_batch_idx
        candidates = self._monitor_candidates(trainer)
        candidates["epoch"] = torch.tensor(self._epoch(trainer))
        known = self.monitor is None or self.monitor in candidates
        last = self.format_checkpoint_name(candidates, self.CHECKPOINT_NAME_LAST)
        self.last_model_path, self._last_checkpoint_saved = last if self.save_last else "", ""
        with nullcontext() if self._io is None else replaced(trainer.strategy, "_checkpoint_io", self._io):
            if self._best_due and known and self._score_step in (-1, trainer.global_step):
                self._best_due = False
                self._save_topk_checkpoint(trainer, candidates)
            if self.save_last and (self._io is None or not self._last_checkpoint_saved):
                self._save_checkpoint(trainer, last)
            elif self.save_last and self._io is not None and trainer.is_global_zero:
                self._io.link_checkpoint(self._last_checkpoint_saved, last)
        logged = {value.meta.name for value in loop._results.values()}
        comes = not loop.batch_progress.is_last_batch and str(self.monitor).removesuffix("_epoch") in logged
        if not known and not comes and (self._validated or not trainer.enable_validation):
            raise ConfigError(
                f"checkpoint: monitor={self.monitor} was not logged. Logged so far: "
                f"{', '.join(sorted(set(candidates) - {'epoch', 'step'})) or 'nothing'}. Set monitor to one of these."
                " Without a metric to rank them by, keep the last: checkpoint=last, Checkpoint(save_top_k=0)."
            )

    @override
    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        score = monitor_candidates.get(self.monitor) if self.monitor is not None else None
        nan = (score is not None and bool(score.isnan())) or has_nan(trainer.lightning_module)
        if self.save_top_k == 0 or not trainer.strategy.reduce_boolean_decision(nan, all=False):
            super()._save_topk_checkpoint(trainer, monitor_candidates)
            return
        if trainer.is_global_zero and not self._told_of_nan:
            what = "the weights contain nan" if score is None or not score.isnan() else f"{self.monitor} is nan"
            log.warning("Step %d: %s, so this state is not kept as one of the best.", trainer.global_step, what)
        self._told_of_nan = True
        if self.save_top_k == -1:
            self._save_checkpoint(trainer, self._get_metric_interpolated_filepath_name(monitor_candidates, trainer))

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        if filepath == self.best_model_path:  # which the file will say, too
            self.best_epoch = self._epoch(trainer)
        super()._save_checkpoint(trainer, filepath)

    @staticmethod
    def _epoch(trainer: pl.Trainer) -> int:
        return trainer.fit_loop.epoch_progress.current.ready - 1

    # Names and scores

    @property
    @override
    def state_key(self) -> str:
        # Scores are kept if the trigger changes, unless the trainer has two callbacks with the same monitor.
        return self._generate_state_key(monitor=self.monitor, mode=self.mode, **self._key_triggers)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best_epoch": self.best_epoch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Keep the best scores if a run resumes into a new directory; Lightning would discard them.
        super().load_state_dict({**state_dict, "dirpath": self.dirpath})
        self.best_epoch = state_dict.get("best_epoch")

    @override
    def _format_checkpoint_name(self, *args: Any, **kwargs: Any) -> str:
        return re.sub(r"[^A-Za-z0-9._-]+", "_", super()._format_checkpoint_name(*args, **kwargs)).lstrip(".-")

    @override
    def file_exists(self, filepath: str | Path, trainer: pl.Trainer) -> bool:
        # A file of the same name that is not in the ranking was left at this step by a killed run.
        return str(filepath) in self.best_k_models


def distinguish(callbacks: Iterable[object]) -> None:
    """Give each `Checkpoint` of a trainer a state key of its own, as Lightning requires."""
    keys: set[str] = set()
    for callback in callbacks:
        if isinstance(callback, Checkpoint):
            if callback.state_key in keys:
                callback._key_triggers = callback._triggers
            keys.add(callback.state_key)


class Interval:
    """A time interval by rank 0's clock, broadcast after half of the batches that the rest is estimated to take."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start()

    def start(self) -> None:
        """Restart the interval."""
        self._since, self._num_batches, self._ask_at = time.monotonic(), 0, 1

    def is_over(self, trainer: pl.Trainer) -> bool:
        """Count a batch; if the interval is over, restart it. All ranks get the same answer."""
        self._num_batches += 1
        if processes_of(trainer.strategy) > 1 and self._num_batches < self._ask_at:
            return False
        elapsed_s = trainer.strategy.broadcast(time.monotonic() - self._since)
        if elapsed_s >= self.seconds:
            self.start()
            return True
        rest = (self.seconds - elapsed_s) / max(elapsed_s, 1e-9) * self._num_batches
        self._ask_at = self._num_batches + max(1, int(min(rest / 2, 1e9)))
        return False


class RunTimer(Timer):
    """Lightning's timer of `max_time`, which counts the time of this run alone, and asks rank 0 at a few batches."""

    def __init__(self, timer: Timer) -> None:
        super().__init__()
        self._duration = timer._duration
        self._rest = Interval(self._duration or 0.0)

    @property
    @override
    def state_key(self) -> str:
        return Timer.__qualname__

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: a run that was stopped by it, and goes on with the same `max_time`, would stop again at once."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._rest.start()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.should_stop and self._rest.is_over(trainer):
            self._check_time_remaining(trainer)
