"""Evaluate beside a training that goes on as if nothing had been evaluated, and stop where a signal asks for it."""

import copy
from contextlib import nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ...strategies.core import rng
from ...strategies.core.module_checks import callbacks_of, is_users
from ...strategies.core.patching import replaced
from ...strategies.registry import ranks_of
from . import _position
from ._loader_state import Resumable, make_resumable

_STARTS = ("on_validation_start", "on_validation_epoch_start")
_ENDS = ("on_validation_epoch_end", "on_validation_end")


def stands_in(trainer: pl.Trainer) -> bool:
    """Whether hooks may put something in the place of the weights for a validation, such as their average.

    They have a part at its start, and one at its end, which must be called before anything is saved.
    """

    def has(owner: Any, names: tuple[str, ...]) -> bool:
        return isinstance(owner, WeightAveraging) or any(is_users(getattr(owner, name)) for name in names)

    owners = (trainer.lightning_module, *callbacks_of(trainer))
    return any(has(owner, _STARTS) and has(owner, _ENDS) for owner in owners)


class ValidationStopped(SIGTERMException):
    """A signal ended a validation within training, whose state before it is to be saved."""


class SeparateEvaluation(_EvaluationLoop):
    """Evaluation, which leaves the random streams of the training around it as they were.

    Its own are made of the seed, the epoch and the rank, and those of its data workers of the batch's number too: what
    they drew before, and whether they persist, makes no difference to a run that is resumed.
    """

    _number = _num_batches = 0
    """Parts of validations that have ended, one per loader, and batches of the present one."""
    _has_ended = False
    is_within_fit = False
    """Whether a validation within training runs."""
    _may_stop = True
    """Whether a signal may stop it before its end."""
    random_of_training: dict[str, Any] | None = None
    """The random states of the training around a validation, while it runs."""

    @override
    def run(self) -> Any:
        trainer = self.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return super().run()
        fit_loop: Any = trainer.fit_loop
        return self._run_isolated() if trainer.sanity_checking else fit_loop.in_section(self._run_isolated)

    def _run_isolated(self) -> Any:
        trainer = self.trainer
        devices = _position.devices_in_use(trainer)
        with rng.isolated(devices) as before, replaced(self, "random_of_training", before):
            rng.seed_all(torch.initial_seed(), trainer.current_epoch, trainer.global_rank, devices=devices)
            return super().run() if trainer.sanity_checking else self._run_within_fit()

    @override
    def increment_progress_to_evaluation_end(self) -> None:
        with rng.isolated(_position.devices_in_use(self.trainer)):  # it makes iterators, which draw seeds
            super().increment_progress_to_evaluation_end()

    def _run_within_fit(self) -> Any:
        self._num_batches, self._has_ended, self._may_stop = 0, False, not stands_in(self.trainer)
        progress = copy.deepcopy(self.batch_progress.state_dict())
        metrics = _position.metric_states(self.trainer.lightning_module)
        self.is_within_fit = True
        try:
            results = super().run()
            if not self._has_ended:  # this rank has no batch, and others may
                self._end()
            fit_loop: Any = self.trainer.fit_loop
            fit_loop.agree_to_end(at_once=True)
            return results
        except ValidationStopped:
            self.batch_progress.load_state_dict(progress)
            _position.restore_metrics(self.trainer.lightning_module, metrics)
            raise
        finally:
            self.is_within_fit = False

    def after_batch(self) -> None:
        """Stop between two batches of a validation within training, if a signal asked for it; the subclass calls it.

        Raises:
            ValidationStopped: all ranks stop here.
        """
        if self.is_within_fit:
            self._num_batches += 1
            if self._may_stop and not self.batch_progress.is_last_batch:
                self._stop(ended=False)

    @override
    def _store_dataloader_outputs(self) -> None:
        # ranks exchange the values of this loader's batches, and one that has stopped before would not come
        if self.is_within_fit:
            self._end()
        super()._store_dataloader_outputs()

    def _end(self) -> None:
        self._has_ended = True
        self._stop(ended=True)
        self._number += 1
        self._num_batches = 0

    def _stop(self, ended: bool) -> None:
        """Stop if a signal was received; several processes agree, and wait for each other at the validation's end."""
        received = self.trainer._signal_connector.received_sigterm
        ranks = ranks_of(self.trainer.strategy)
        stops = received and not ended
        if ranks is not None:
            stops = ranks.group.stopping.stops_validation(received, self._number, self._num_batches, ended)
        if stops:
            raise ValidationStopped

    @override
    def setup_data(self) -> None:
        fit_loop: Any = self.trainer.fit_loop
        before, trained, random = self._combined_loader, fit_loop._combined_loader, self.random_of_training
        fits = self.trainer.state.fn == TrainerFn.FITTING
        if fits and trained is not None and (random or self.trainer.num_sanity_val_steps):
            random = fit_loop.random_of_loaders
        with rng.isolated() if random else nullcontext():  # so that a `random_split` in both methods is one split
            if random:
                rng.restore(random)
            super().setup_data()
        combined = self._combined_loader
        if combined is None or combined is before or not fits:
            return
        # a loader that training reads, too, has a position, and workers, of its own here
        own = (part.loader if isinstance(part, Resumable) else part for part in combined._flattened)
        combined._flattened = [make_resumable(part, self.trainer.global_rank) for part in own]
