"""Run validation, test and prediction as `loops.py` runs training: without the calls that have no effect.

A training goes on as if nothing had been validated within it: the random streams of a validation are made of the seed,
the epoch, the rank and, in data workers, the batch's number. A signal stops it between two batches.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from pytorch_lightning.callbacks import BasePredictionWriter, WeightAveraging
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.prediction_loop import _PredictionLoop
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ...strategies.core import rng
from ...strategies.core.module_checks import callbacks_of, is_users, metrics_of
from ...strategies.core.patching import metric_state, replaced
from ...strategies.core.types import Batch
from ...strategies.registry import devices_in_use, ranks_of
from ..checkpoint import Resumable, make_resumable
from ..logging.results import LeanResults
from .step_plan import StepPlan, may_be_lean, to_cpu


class EvaluationStep(StepPlan):
    """The lean step of a validation, test or prediction loop whose data is set up."""

    def __init__(self, loop: Any) -> None:
        trainer = loop.trainer
        stage = "predict" if isinstance(loop, _PredictionLoop) else "test" if trainer.testing else "validation"
        self.loop: Any = loop
        self.connector = trainer._logger_connector
        self.results: LeanResults | None = loop._results  # None for predictions
        self.start_name, self.end_name = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        self.sanity_checks = trainer.sanity_checking
        self.names_loader = self.loop._combined_loader._mode == "sequential" and self.loop.num_dataloaders > 1
        super().__init__(trainer, self.loop._data_fetcher, f"{stage}_step", (self.start_name, self.end_name))

    @override
    def resolve(self) -> None:
        super().resolve()
        writers = (callback for callback in self.callbacks if isinstance(callback, BasePredictionWriter))
        self.writes = self.results is None and any(writers)

    def run(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        """Run one step, with Lightning's hooks and counters in Lightning's order."""
        loop, results, progress = self.loop, self.results, self.loop.batch_progress
        if self.stale():
            self.resolve()
        batch = self.move(batch, dataloader_idx)
        args = (batch, batch_idx, dataloader_idx) if self.names_loader else (batch, batch_idx)
        step_args = args if self.takes_index else (batch, *args[2:])
        if self.contract.stands_in():
            self.call_as(self.step_name, self.step, *step_args)
            return
        progress.increment_ready()
        if results is not None:
            self.connector.on_batch_start(batch, dataloader_idx if self.names_loader else None, results)
        writes = self.writes and loop._store_data_for_prediction_writer(batch_idx, dataloader_idx)
        if self.start_name in self.work:
            self.call(self.start_name, *args)
        progress.increment_started()
        output = self.call_as(self.step_name, self.step, *step_args)
        progress.increment_processed()
        if self.stale():
            self.resolve()
        if self.end_name in self.work:
            self.call(self.end_name, output, *args)
        if results is None:
            progress.increment_completed()
            if output is None:
                loop._warning_cache.warn("predict returned None if it was on purpose, ignore this warning...")
            if loop.return_predictions or writes:
                loop._predictions[dataloader_idx].append(to_cpu(output))
            return
        self.connector.on_batch_end()
        progress.increment_completed()
        if not self.sanity_checks:
            seen = loop._seen_batches_per_dataloader
            if results.logs_steps:
                self.connector.update_eval_step_metrics(seen[dataloader_idx])
            seen[dataloader_idx] += 1
        # the trainer's own property checks the stage first, which costs several times as much
        received = self.trainer._signal_connector.received_sigterm
        if received and not progress.is_last_batch and self.trainer.received_sigterm:
            raise SIGTERMException


class PlannedLoop(_Loop):
    """What validation, test and prediction share: a plan of their steps."""

    trainer: Any
    inference_mode: bool
    _may_stop = False
    _plan: EvaluationStep | None = None

    def run(self) -> Any:
        """Run in inference mode under gloo, too, which takes its tensors; not where a step is an exchange (FSDP)."""
        ranks = ranks_of(self.trainer.strategy)
        infers = self.inference_mode and ranks is not None and not ranks.sync.evaluates_together
        try:
            with torch.inference_mode() if infers else nullcontext():
                return cast("Any", super()).run()
        finally:  # also where a signal or a failure ends it, which leads to a checkpoint of all ranks
            if ranks is not None:
                ranks.whole_batches.end_evaluation()

    def reset(self) -> None:
        """Plan the steps of the next run, unless Lightning's own must run."""
        cast("Any", super()).reset()
        self._plan = EvaluationStep(self) if may_be_lean(self.trainer, vars(self)["_data_fetcher"]) else None

    def run_planned(self, plan: EvaluationStep, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        """Run a step and, of a single loader, all others, without Lightning's loop around each."""
        loop, loader = cast("Any", self), plan.loader
        while True:
            plan.run(batch, batch_idx, dataloader_idx)
            if self._may_stop:
                loop.stop_if_asked()
            if loader is None or loop.restarting or loader.fetcher.done:
                return
            batch_idx, batch = loader.combined._idx, next(loader)
            loop.batch_progress.is_last_batch = loader.fetcher.done

    def teardown(self) -> None:
        """Forget the plan, which holds the run's objects."""
        self._plan = None
        cast("Any", super()).teardown()


class ValidationStopped(SIGTERMException):
    """A signal ended a validation within training, whose state before it is to be saved."""


class LeanEvaluationLoop(PlannedLoop, _EvaluationLoop):
    """Validation or test."""

    random_of_training: rng.RandomState | None = None  # the states of the training around a validation, while it runs
    _may_stop = False  # whether a signal may stop the present validation before its end
    _by_loader = False  # whether ranks exchange the outputs of several loaders, one after the other
    _to_store = 0  # the loader whose outputs are stored next

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._results = LeanResults(self.trainer, training=False)

    @override
    def run(self) -> Any:
        trainer = self.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return super().run()
        return self._run_within_fit() if trainer.sanity_checking else trainer.fit_loop.in_section(self._run_within_fit)

    def _run_within_fit(self) -> Any:
        trainer, devices = self.trainer, devices_in_use(self.trainer.strategy)
        with rng.isolated(devices) as before, replaced(self, "random_of_training", before):
            rng.seed_all(torch.initial_seed(), trainer.current_epoch, trainer.global_rank, devices=devices)
            if trainer.sanity_checking:
                return super().run()
            starts = ("on_validation_start", "on_validation_epoch_start")
            # hooks may put an average of the weights in their place, until others have ended it
            self._may_stop = not any(
                isinstance(owner, WeightAveraging) or any(is_users(getattr(owner, name)) for name in starts)
                for owner in (trainer.lightning_module, *callbacks_of(trainer))
            )
            progress = copy.deepcopy(self.batch_progress.state_dict())
            metrics = [(metric, metric_state(metric)) for metric in metrics_of(trainer.lightning_module)]
            try:
                results = super().run()
                self.stop_if_asked(ended=True)
                trainer.fit_loop.agree_to_end(at_once=True)
                return results
            except ValidationStopped:
                self.batch_progress.load_state_dict(progress)
                for metric, state in metrics:
                    vars(metric).update(state)
                raise
            finally:
                self._may_stop = False

    def stop_if_asked(self, ended: bool = False) -> None:
        """Stop after a batch of a fit's validation if a signal asks for it; ranks agree, and meet where it ended."""
        if not self._may_stop or (self.batch_progress.is_last_batch and not ended):
            return
        self._may_stop = not ended
        received, ranks = self.trainer._signal_connector.received_sigterm, ranks_of(self.trainer.strategy)
        stops = received and not ended
        if ranks is not None:
            number, num_batches = self.trainer.fit_loop.total_batch_idx, self.batch_progress.current.ready
            stops = ranks.group.stopping.stops_validation(received, number, num_batches, ended)
        if stops:
            raise ValidationStopped

    @override
    def increment_progress_to_evaluation_end(self) -> None:
        with rng.isolated(devices_in_use(self.trainer.strategy)):  # it makes iterators, which draw seeds
            super().increment_progress_to_evaluation_end()

    @override
    def setup_data(self) -> None:
        before, fits = self._combined_loader, self.trainer.state.fn == TrainerFn.FITTING
        with rng.isolated() if fits else nullcontext():
            super().setup_data()
        combined = self._combined_loader
        if fits and combined is not None and combined is not before:
            # a loader that training reads, too, has a position, and workers, of its own here
            own = (part.loader if isinstance(part, Resumable) else part for part in combined._flattened)
            combined._flattened = [make_resumable(part, self.trainer.global_rank) for part in own]

    @override
    def reset(self) -> None:
        super().reset()
        sequential = self._combined_loader is not None and self._combined_loader._mode == "sequential"
        self._by_loader = sequential and len(self.max_batches) > 1 and self.trainer.world_size > 1
        self._may_stop &= not self._by_loader
        self._to_store = 0
        vars(self._results).pop("ranks", None)  # by now each may have whole batches

    @override
    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        self._store_until(dataloader_idx)
        if self._plan is None:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            self.stop_if_asked()
        else:
            self._has_run = not self._plan.sanity_checks
            self.run_planned(self._plan, batch, batch_idx, dataloader_idx)

    @override
    def _store_dataloader_outputs(self) -> None:
        if not self._by_loader:
            self.stop_if_asked(ended=True)
            super()._store_dataloader_outputs()

    @override
    def on_run_end(self) -> list[Any]:
        self._store_until(len(self.max_batches))
        self.trainer._logger_connector.is_exchanged = True  # with the outputs of the last loader
        return super().on_run_end()

    def _store_until(self, end: int) -> None:
        """Store the outputs of the loaders before `end`, also of those that gave batches to other ranks only."""
        if end <= self._to_store or not self._by_loader:
            return
        results, current = self._results, self._results.dataloader_idx
        for index in range(self._to_store, end):
            if not index or self.max_batches[index]:
                results.dataloader_idx = index
                super()._store_dataloader_outputs()
        self._to_store, results.dataloader_idx = end, current


class LeanPredictionLoop(PlannedLoop, _PredictionLoop):
    """Prediction."""

    @override
    def _predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        if self._plan is None:
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        else:
            self.run_planned(self._plan, batch, batch_idx, dataloader_idx)
