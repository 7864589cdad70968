"""Evaluate beside a training that goes on as if nothing had been evaluated, and stop where a signal asks for it."""

import copy
from typing import Any

import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ...strategies.core import rng
from ...strategies.core.private import of_lightning, put
from ...strategies.core.private.of_lightning import EvaluationLoop
from ...strategies.registry import ranks_of
from . import _run_state
from ._loader_state import make_resumable


class ValidationStopped(SIGTERMException):
    """A signal ended a validation within training, whose state before it is to be saved."""


class SeparateEvaluation(EvaluationLoop):
    """Evaluation, which leaves the random streams of the training around it as they were.

    Its own are made of the seed, the epoch and the rank, and those of its data workers of the batch's number too: what
    they drew before, and whether they persist, makes no difference to a run that is resumed.
    """

    _number = _num_batches = 0
    """Parts of validations that have ended, one per loader, and batches of the present one."""
    _has_ended = False
    is_within_fit = False
    """Whether a validation within training runs, which a signal may stop."""

    @override
    def run(self) -> Any:
        trainer = self.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return super().run()
        devices = _run_state.devices_in_use(trainer)
        with rng.isolated(devices):
            rng.seed_all(torch.initial_seed(), trainer.current_epoch, trainer.global_rank, devices=devices)
            return super().run() if trainer.sanity_checking else self._run_within_fit()

    @override
    def increment_progress_to_evaluation_end(self) -> None:
        with rng.isolated(_run_state.devices_in_use(self.trainer)):  # it makes iterators, which draw seeds
            super().increment_progress_to_evaluation_end()

    def _run_within_fit(self) -> Any:
        self._num_batches, self._has_ended = 0, False
        progress = copy.deepcopy(self.batch_progress.state_dict())
        metrics = _run_state.metric_states(self.trainer.lightning_module)
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
            _run_state.restore_metrics(self.trainer.lightning_module, metrics)
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
            if not self.batch_progress.is_last_batch:
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
        received = of_lightning.signal_connector(self.trainer).received_sigterm
        ranks = ranks_of(self.trainer.strategy)
        stops = received and not ended
        if ranks is not None:
            stops = ranks.group.agree_to_stop_validation(received, self._number, self._num_batches, ended)
        if stops:
            raise ValidationStopped

    @override
    def setup_data(self) -> None:
        before = self._combined_loader
        super().setup_data()
        combined, fit_loop = self._combined_loader, self.trainer.fit_loop
        if combined is None or combined is before or self.trainer.state.fn != TrainerFn.FITTING:
            return
        trained = of_lightning.combined_loader(fit_loop)
        trained_on = [] if trained is None else list(map(id, trained.flattened))
        combined.flattened = [_copy_of(part) if id(part) in trained_on else part for part in combined.flattened]
        for loader in combined.flattened:
            make_resumable(loader, self.trainer.global_rank)


def _copy_of(loader: Any) -> Any:
    """A loader with a position, and workers, of its own."""
    other = copy.copy(loader)
    if hasattr(other, of_lightning.ITERATOR):
        put(other, iterator=None)
    return other
