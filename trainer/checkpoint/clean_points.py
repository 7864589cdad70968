"""Save and resume at clean points, where no batch, validation or epoch is half done.

Lightning saves inside hooks: the batch is trained but not logged, or validation is over but the epoch is not, and a
restart has to guess the remaining work. Here a checkpoint is written *between* two batches, or after an epoch with all
its hooks, and a resumed run simply takes the next batch.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytorch_lightning as pl
from lightning_fabric.utilities.data import _set_sampler_epoch
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint
from pytorch_lightning.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, Timer
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from ...strategies.core.module_checks import callbacks_of
from ...strategies.core.patching import replaced
from ...strategies.distributed.objects import gather_objects
from ...strategies.registry import ranks_of
from ..loggers import journal
from . import _position
from ._callback import Checkpoint
from ._hparams import EXACT, KINDS
from ._loader_state import POSITION, Resumable, make_resumable, restore_generators, stateful, verify_states
from ._position import Place, Position, counts_global_batches
from ._sections import Sections
from .checkpoint_io import HostMemory
from .file_io import CheckpointError

_T = TypeVar("_T")


class ExactCheckpoints(_CheckpointConnector):
    """Extends Lightning's checkpoints, unchanged for all hooks, with our own state before they are written."""

    @override
    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the state of a run; every rank must call it."""
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        trainer: Any = self.trainer
        if weights_only:
            return checkpoint
        end: dict[str, Any] | None = trainer.fit_loop.end
        if end is not None:  # callbacks that save must know the files written since
            kept = end.get("callbacks", {})
            states = {key: kept.get(key, state) for key, state in checkpoint.get("callbacks", {}).items()}
            return {**checkpoint, **end, "callbacks": states}
        fitting = trainer.state.fn == TrainerFn.FITTING and (trainer.training or trainer.validating)
        return {**checkpoint, EXACT: trainer.fit_loop.resume_state()} if fitting else checkpoint

    @override
    def resume_start(self, checkpoint_path: _PATH | None = None, weights_only: bool | None = None) -> None:
        trainer: Any = self.trainer
        fit_loop = trainer.fit_loop
        if checkpoint_path is not None:  # the weights are no longer those of the run that has ended
            fit_loop.end = None
        try:
            super().resume_start(checkpoint_path, weights_only)
        except KeyError as exc:
            raise CheckpointError(
                f"The checkpoint {checkpoint_path} was not saved by a trainer: it has no entry {exc}. Give a trainer's "
                "checkpoint, or load plain weights with module.load_state_dict."
            ) from exc
        self._loaded_checkpoint.pop(KINDS, None)
        saved = self._loaded_checkpoint.pop(EXACT, {})
        fit_loop.resumed = Position.read(saved if trainer.state.fn == TrainerFn.FITTING else {})


class ResumingFitLoop(_FitLoop):
    """Loop over epochs that saves and resumes at clean points."""

    _point: Place | None = None  # of the checkpoint being written
    resumed = Position()  # the point at which this run goes on, until it has
    end: dict[str, Any] | None = None  # entries of all checkpoints saved once training has ended, for their own
    brought_back = ("end",)  # what a script gets of this loop from its ranks, besides progress and numbers
    _savers: tuple[Checkpoint, ...] = ()
    begins_epoch = False  # a hook has saved after an epoch's last batch: the resumed run begins the next one
    has_clean_points = True
    _has_metrics = False  # those logged last were restored: else Lightning would not step plateau schedulers
    takes_steps = False  # whether the run has begun to train, so that a stop between two steps has something to save
    sections: Sections | None = None  # of a run whose ranks go on without those that die

    def in_section(self, work: Callable[[], _T], counts: bool = True) -> _T:
        """Do what ranks do together, and again on those that live if one dies in it; see `Sections.run`."""
        return work() if self.sections is None else self.sections.run(work, counts)

    # Save

    def between_batches(self) -> None:
        """Write a checkpoint if due, after a batch and its logging, validation and schedulers."""
        if self.epoch_loop.batch_progress.is_last_batch:
            return
        self._save_due("between_batches")
        for saver in self._savers:
            if saver.snapshots is not None and saver.snapshots.is_due(self.trainer.global_step):
                self._save(saver.snapshots.take, "between_batches")

    def _save_due(self, point: Place, or_lacking: bool = False) -> None:
        for saver in self._savers:
            if saver.due or (or_lacking and saver.lacks(self.trainer)):
                self._save(saver.save, point)

    def _save(self, save: Callable[[Any], None], point: Place) -> None:
        with replaced(self, "_point", point):
            self.in_section(partial(save, self.trainer))

    def resume_state(self) -> dict[str, Any]:
        """Capture the `EXACT` entry of a checkpoint; every rank must call it."""
        own = _position.capture(self.trainer, self._point != "after_epoch" and self.epoch_loop._should_accumulate())
        return Position(
            self._point,
            self.trainer.should_stop and not _is_time_over(self.trainer),
            journal.ends(self.trainer),
            counts_global_batches(self.trainer),
            [own] if self.trainer.world_size == 1 else gather_objects(own, only_first=True) or None,
        ).to_dict()

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        saved: dict[str, Any] = super().on_save_checkpoint()
        if self._combined_loader is not None:
            # Remove positions that only we can restore; they are kept under `EXACT`.
            states = zip(stateful(self._combined_loader), saved.pop("combined_loader", []), strict=True)
            if theirs := [kept for part, kept in states if not isinstance(part, Resumable)]:
                saved["combined_loader"] = theirs
        return saved

    # Stop and end

    def stop_at(self, point: Place) -> None:
        """Save and stop if a signal was received; with several processes, once all of them stop at this step."""
        received, ranks = self.trainer._signal_connector.received_sigterm, ranks_of(self.trainer.strategy)
        if point == "before_validation":  # where a signal has ended the validation after a batch, which comes again
            self.trainer.training = True
        elif not (received if ranks is None else ranks.group.stopping.agreed(received, self.trainer.global_step)):
            return
        self._save_and_stop(point)

    def _save_and_stop(self, point: Place) -> None:
        self.trainer.agreed_to_stop = True  # pyright: ignore[reportAttributeAccessIssue]  # an attribute of our Trainer
        self._save_due(point, or_lacking=True)
        saved = [saver.last_model_path for saver in self._savers if saver.last_model_path]
        what = "nothing is saved. Add a Checkpoint callback with save_last=True to keep the last state."
        if saved:
            what = f"saved {saved[0]}; continue with resume=last (in a script: ckpt_path)."
        rank_zero_info(f"Interrupted at step {self.trainer.global_step}; {what}")
        raise SIGTERMException

    def agree_to_end(self, at_once: bool = False) -> None:
        """Have ranks end training together where `trainer.should_stop` is set on some (`at_once`), or on all."""
        trainer, ranks = self.trainer, ranks_of(self.trainer.strategy)
        if ranks is not None:
            trainer.should_stop = ranks.group.stopping.ends(trainer.should_stop, trainer.global_step, at_once)

    @override
    def on_advance_start(self) -> None:
        self.in_section(super().on_advance_start)

    @override
    def on_advance_end(self) -> None:
        if self._has_metrics:
            self._restarting = False
        if self.sections is not None:
            self.sections.reads = False
        try:
            self.in_section(super().on_advance_end)
        except SIGTERMException:
            self._save_and_stop("after_epoch")
        self.in_section(partial(self.agree_to_end, at_once=True))
        self._save_due("after_epoch")
        self.stop_at("after_epoch")

    def end_within_epoch(self) -> None:
        """Note that steps or time are used up between two batches, before the hooks at the end of the epoch run."""
        steps, limit = self.epoch_loop.global_step, self.epoch_loop.max_steps  # several steps a batch may go beyond it
        is_used_up = 0 <= limit <= steps or _is_time_over(self.trainer)
        if is_used_up and not self.epoch_loop.batch_progress.is_last_batch:
            self.end = self._end_at("between_batches")

    def _end_at(self, point: Place) -> dict[str, Any]:
        """Copy where training has ended, with the states of all ranks; every rank must call it."""
        trainer = self.trainer
        with replaced(self, "_point", point):
            end = {EXACT: self.resume_state()}
        if point != "after_epoch":
            # Lightning ends the epoch all the same: hooks run, metrics are reset, and the next epoch is counted. A run
            # that goes on with more steps must not see that.
            loops = trainer._checkpoint_connector._get_loops_state_dict()
            counted = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "loops": loops}
            found = (cb for cb in callbacks_of(trainer) if not isinstance(cb, LightningCheckpoint))
            end |= {**copy.deepcopy(counted), "callbacks": {cb.state_key: cb.state_dict() for cb in found}}
        return HostMemory().take(end)

    @override
    def on_run_end(self) -> None:
        self.takes_steps = False
        if self.end is None:
            self.end = self._end_at("after_epoch")
        self._save_due("after_epoch", or_lacking=True)
        self.in_section(super().on_run_end)
        if self.sections is not None:
            self.sections.end()
            self.sections = None

    # Resume

    @override
    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        super().load_state_dict(state_dict, prefix)
        self.resumed = self.resumed.for_rank(self.trainer)
        if self.resumed.own is not None:
            states = self.resumed.own["loaders"]
            if self.resumed.point == "after_epoch":  # of those that have ours the position is that of the next epoch
                states = [{**own, "position": 0, "start": None} if own.keys() >= POSITION else own for own in states]
            self._combined_loader_states_to_load = states
        if self._combined_loader_states_to_load and self._combined_loader is not None:
            self._combined_loader = None  # a strategy that has looked at samples in its setup began to read
        if self.resumed.point == "after_epoch":  # Lightning considers a run bounded by steps unfinished.
            self._restarting = self.epoch_loop._restarting = self.epoch_loop.val_loop._restarting = False
            self.trainer.should_stop = self.resumed.should_stop

    @property
    @override
    def skip(self) -> bool:
        skips = super().skip
        if skips and self.resumed.point is not None and self.resumed.own is not None:
            why = "it was stopped early" if self.trainer.should_stop else "max_epochs or max_steps is reached"
            step = self.epoch_loop.global_step
            rank_zero_info(f"The checkpoint's run has finished, at step {step} ({why}): nothing is left to train.")
            self.trainer._logger_connector._callback_metrics.update(self.resumed.own["logged"])
        return skips

    @override
    def _load_combined_loader_states(self) -> None:
        assert self._combined_loader is not None
        progress: Any = self.epoch_progress.current
        loaders = [make_resumable(loader, self.trainer.global_rank) for loader in self._combined_loader.flattened]
        self._combined_loader._flattened = loaders  # `trainer.train_dataloader` stays the user's
        for loader in loaders if self._resuming_from_checkpoint else ():
            # Workers start to load as soon as the iterator is created, before Lightning sets the epoch.
            _set_sampler_epoch(loader, progress.processed)
        if self.restarting:
            verify_states(stateful(self._combined_loader), self._combined_loader_states_to_load)
        if self._resuming_from_checkpoint and self.resumed.point is None:
            self.update_restart_stage()
            ended = self.epoch_loop.restarted_on_train_batch_end or self.resumed_on_epoch_end
            if ended and self.epoch_loop.batch_progress.is_last_batch:  # Lightning goes on with the next epoch
                self.begins_epoch, self._combined_loader_states_to_load = True, []
        super()._load_combined_loader_states()

    @override
    def on_run_start(self) -> None:
        self.takes_steps, self.end = False, None
        self._savers = tuple(cb for cb in self.trainer.checkpoint_callbacks if isinstance(cb, Checkpoint))
        super().on_run_start()
        self._has_metrics, rows = False, None if self.trainer.ckpt_path is None else self.resumed.rows
        if self.is_resuming:
            self._go_on()
        journal.cut_back(self.trainer.loggers if self.trainer.is_global_zero else [], rows)
        self.takes_steps = True
        self.agree_to_end(at_once=True)
        ranks = ranks_of(self.trainer.strategy)
        survivor = None if ranks is None else ranks.group.survivor
        self.sections = None if survivor is None else Sections.of(self.trainer, survivor)

    def _go_on(self) -> None:
        """Restore the state of the checkpoint that is resumed, once the hooks at the start of the run have run."""
        own, point, within = self.resumed.own, self.resumed.point, self.resumed.is_between_batches
        if own is not None:
            self._has_metrics = True
            _position.restore(self.trainer, own, self.begins_epoch)
            if self.resumed_on_epoch_end:  # a hook has saved there: these step after it
                self.epoch_progress.current.completed -= 1
                self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
                self.epoch_progress.current.completed += 1
        for callback in callbacks_of(self.trainer) if within else ():
            # what these set at the epoch's start holds for the rest of it
            if isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)):
                callback.on_train_epoch_start(self.trainer, self.trainer.lightning_module)
        if point == "after_epoch":  # replace the iterator from the loop's setup where a running epoch creates it
            self._resuming_from_checkpoint = False
        if (self.begins_epoch or point == "after_epoch") and own is not None and self._combined_loader is not None:
            restore_generators(self._combined_loader, own["loaders"])
        self.resumed = replace(self.resumed, ranks=None) if within else Position()

    def begin_epoch(self, data_fetcher: Any, restarting: bool) -> Place | None:
        """Begin to read an epoch, and return the point at which it was left if the run resumes within it."""
        if self.begins_epoch and (restarting or self.is_resuming):  # where Lightning takes the setup's iterator
            iter(data_fetcher)  # with the random state restored
        self.begins_epoch = False
        resumed, self.resumed = self.resumed, Position()
        return resumed.point


def _is_time_over(trainer: pl.Trainer) -> bool:
    """Whether a run stops because its time is over, by rank 0's clock; every rank must call it."""
    timers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Timer)]
    if not timers or not trainer.should_stop:
        return False
    over = any((rest := timer.time_remaining()) is not None and rest <= 0 for timer in timers)
    return trainer.strategy.broadcast(over)
