"""Evaluate beside a training that goes on as if nothing had been evaluated."""

from contextlib import nullcontext
from typing import Any

import torch
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.trainer.states import TrainerFn
from typing_extensions import override

from ...strategies.core import rng
from ...strategies.core.patching import replaced
from . import _position
from ._loader_state import Resumable, make_resumable


class SeparateEvaluation(_EvaluationLoop):
    """Evaluation, which leaves the random streams of the training around it as they were.

    Its own are made of the seed, the epoch and the rank, and those of its data workers of the batch's number too: what
    they drew before, and whether they persist, makes no difference to a run that is resumed.
    """

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
            results = super().run()
            if not trainer.sanity_checking:
                fit_loop: Any = trainer.fit_loop
                fit_loop.agree_to_end(at_once=True)
            return results

    @override
    def increment_progress_to_evaluation_end(self) -> None:
        with rng.isolated(_position.devices_in_use(self.trainer)):  # it makes iterators, which draw seeds
            super().increment_progress_to_evaluation_end()

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
