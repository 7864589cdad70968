"""Run validation, test and prediction as `loops.py` runs training: without the calls that have no effect.

A training goes on as if nothing had been validated within it. The random streams of a validation are made of the seed,
the epoch and the rank, and those of its data workers of the batch's number, too: what they drew before, and whether
they persist, makes no difference to a run that is resumed. A signal stops it between two batches.
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
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from ...strategies.core import rng
from ...strategies.core.module_checks import callbacks_of, is_users, metrics_of
from ...strategies.core.patching import metric_state, replaced
from ...strategies.core.types import Batch
from ...strategies.registry import contract_of, devices_in_use, ranks_of
from ..checkpoint import Resumable, make_resumable
from ..logging.results import LeanResults
from ._batch_fetch import OneLoader, batch_mover, may_read_lean, to_cpu
from .hook_plan import HookPlan


class StepPlan:
    """The lean steps of a validation, test or prediction loop, with its data set up, resolved once per run."""

    def __init__(self, loop: Any) -> None:
        trainer, predicts = loop.trainer, isinstance(loop, _PredictionLoop)
        stage = "predict" if predicts else "test" if trainer.testing else "validation"
        self.loop = loop
        self.connector = trainer._logger_connector
        self.results: LeanResults | None = None if predicts else loop._results
        self.step_name = f"{stage}_step"
        self.start_name, self.end_name = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        self.hooks = HookPlan(trainer, (self.start_name, self.end_name))
        self.loader = OneLoader.of(loop._data_fetcher)
        self.sanity_checks = trainer.sanity_checking
        self.contract = contract_of(trainer.strategy)
        self.names_loader = loop._combined_loader._mode == "sequential" and loop.num_dataloaders > 1
        self.resolve()

    def resolve(self) -> None:
        """Make the choices that do not change from batch to batch."""
        hooks = self.hooks
        hooks.resolve()
        self.move = batch_mover(hooks)
        self.plain = hooks.step_is_the_modules(self.step_name)
        predicts = self.step_name == "predict_step"
        self.writes = predicts and any(isinstance(callback, BasePredictionWriter) for callback in hooks.callbacks)
        step = getattr(hooks.module, self.step_name)
        self.takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)

    def run(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        """Run one step, with Lightning's hooks and counters in Lightning's order."""
        loop, hooks, results, connector = self.loop, self.hooks, self.results, self.connector
        total, current = loop.batch_progress.total, loop.batch_progress.current
        if hooks.stale():
            self.resolve()
        batch = self.move(batch, dataloader_idx)
        # of the batch hooks
        args = (batch, batch_idx, dataloader_idx) if self.names_loader else (batch, batch_idx)
        if self.contract.stands_in():
            self._step(args)
            return
        total.ready += 1
        current.ready += 1
        if results is not None:
            connector.on_batch_start(batch, dataloader_idx if self.names_loader else None, results)
        writes = self.writes and loop._store_data_for_prediction_writer(batch_idx, dataloader_idx)
        if self.start_name in hooks.work:
            hooks.call(self.start_name, *args)
        total.started += 1
        current.started += 1
        output = self._step(args)
        total.processed += 1
        current.processed += 1
        if hooks.stale():
            self.resolve()
        if self.end_name in hooks.work:
            hooks.call(self.end_name, output, *args)
        if results is not None:
            connector.on_batch_end()
        total.completed += 1
        current.completed += 1
        if results is not None:
            self._end_evaluated(results, dataloader_idx)
            return
        if output is None:
            loop._warning_cache.warn("predict returned None if it was on purpose, ignore this warning...")
        if loop.return_predictions or writes:
            loop._predictions[dataloader_idx].append(to_cpu(output))

    def _step(self, args: tuple[Any, ...]) -> Any:
        """Call the module's step, through the strategy if the strategy overrides it."""
        if not self.takes_index:
            args = (args[0], *args[2:])
        owner = self.hooks.module if self.plain else self.hooks.strategy
        return self.hooks.call_as(self.step_name, getattr(owner, self.step_name), *args)

    def _end_evaluated(self, results: LeanResults, dataloader_idx: int) -> None:
        trainer, loop = self.hooks.trainer, self.loop
        if not self.sanity_checks:
            seen = loop._seen_batches_per_dataloader
            if results.logs_steps:
                self.connector.update_eval_step_metrics(seen[dataloader_idx])
            seen[dataloader_idx] += 1
        # the trainer's own property checks the stage first, which costs several times as much
        received = trainer._signal_connector.received_sigterm
        if received and not loop.batch_progress.is_last_batch and trainer.received_sigterm:
            raise SIGTERMException


class PlannedLoop(_Loop):
    """What validation, test and prediction share: the mode in which they run, and a plan of their steps."""

    inference_mode: bool
    _may_stop = False
    _plan: StepPlan | None = None

    def run(self) -> Any:
        """Run in inference mode where Lightning would only turn gradients off because the ranks use gloo.

        torch 2.13's gloo takes inference tensors. Steps that are exchanges themselves, as FSDP's, stay without.
        """
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
        self._plan = StepPlan(self) if may_read_lean(self.trainer, vars(self)["_data_fetcher"]) else None

    def run_planned(self, plan: StepPlan, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        """Run a step and, of a single loader, all others, without Lightning's loop around each.

        Raises:
            StopIteration: the loader has ended before it was known, as Lightning's loop expects.
        """
        loop, loader = cast("Any", self), plan.loader
        while True:
            plan.run(batch, batch_idx, dataloader_idx)
            if self._may_stop:
                loop.after_batch()
            if loader is None or loop.restarting or loader.fetcher.done:
                return
            batch_idx, batch = loader.combined._idx, next(loader)
            loop.batch_progress.is_last_batch = loader.fetcher.done

    def teardown(self) -> None:
        """Forget the plan, which holds the run's objects."""
        self._plan = None
        cast("Any", super()).teardown()


def _has_own_start(owner: Any) -> bool:
    return any(is_users(getattr(owner, name)) for name in ("on_validation_start", "on_validation_epoch_start"))


class ValidationStopped(SIGTERMException):
    """A signal ended a validation within training, whose state before it is to be saved."""


class LeanEvaluationLoop(PlannedLoop, _EvaluationLoop):
    """Validation or test.

    Attributes:
        random_of_training: the random states of the training around a validation, while it runs.
    """

    random_of_training: dict[str, Any] | None = None
    _may_stop = False  # whether a signal may stop the present validation before its end

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._results = LeanResults(self.trainer, training=False)
        self._to_store = 0  # the loader whose outputs are stored next

    @override
    def run(self) -> Any:
        trainer = self.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return super().run()
        fit_loop: Any = trainer.fit_loop
        return self._run_isolated() if trainer.sanity_checking else fit_loop.in_section(self._run_isolated)

    def _run_isolated(self) -> Any:
        trainer, devices = self.trainer, devices_in_use(self.trainer.strategy)
        with rng.isolated(devices) as before, replaced(self, "random_of_training", before):
            rng.seed_all(torch.initial_seed(), trainer.current_epoch, trainer.global_rank, devices=devices)
            return super().run() if trainer.sanity_checking else self._run_within_fit()

    def _run_within_fit(self) -> Any:
        owners = (self.trainer.lightning_module, *callbacks_of(self.trainer))
        # hooks may put an average of the weights in their place, until others have ended it
        self._may_stop = not any(isinstance(one, WeightAveraging) or _has_own_start(one) for one in owners)
        progress = copy.deepcopy(self.batch_progress.state_dict())
        metrics = [(metric, metric_state(metric)) for metric in metrics_of(self.trainer.lightning_module)]
        fit_loop: Any = self.trainer.fit_loop
        try:
            results = super().run()
            self._end()
            fit_loop.agree_to_end(at_once=True)
            return results
        except ValidationStopped:
            self.batch_progress.load_state_dict(progress)
            for metric, state in metrics:
                vars(metric).update(state)
            raise
        finally:
            self._may_stop = False

    def after_batch(self) -> None:
        """Stop between two batches of a validation within training, if a signal asks for it.

        Raises:
            ValidationStopped: all ranks stop here.
        """
        if not self.batch_progress.is_last_batch and not self._is_exchanged_by_loader():
            self._stop(ended=False)

    def _end(self) -> None:
        """Wait for ranks that may have stopped, before values are exchanged with them."""
        if self._may_stop and ranks_of(self.trainer.strategy) is not None and not self._is_exchanged_by_loader():
            self._may_stop = False
            self._stop(ended=True)

    def _stop(self, ended: bool) -> None:
        """Stop if a signal was received; several processes agree, and wait for each other at the validation's end."""
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
        if combined is None or combined is before or not fits:
            return
        # a loader that training reads, too, has a position, and workers, of its own here
        own = (part.loader if isinstance(part, Resumable) else part for part in combined._flattened)
        combined._flattened = [make_resumable(part, self.trainer.global_rank) for part in own]

    @override
    def reset(self) -> None:
        super().reset()
        self._to_store = 0
        vars(self._results).pop("ranks", None)  # by now each may have whole batches

    @override
    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        self._store_until(dataloader_idx)
        if self._plan is None:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            if self._may_stop:
                self.after_batch()
        else:
            self._has_run = not self._plan.sanity_checks
            self.run_planned(self._plan, batch, batch_idx, dataloader_idx)

    @override
    def _store_dataloader_outputs(self) -> None:
        if not self._is_exchanged_by_loader():
            self._end()
            super()._store_dataloader_outputs()

    @override
    def on_run_end(self) -> list[Any]:
        self._store_until(len(self.max_batches))
        connector: Any = self.trainer._logger_connector
        connector.is_exchanged = True  # with the outputs of the last loader
        return super().on_run_end()

    def _is_exchanged_by_loader(self) -> bool:
        """Whether ranks exchange the outputs of several loaders, one after the other."""
        loader = self._combined_loader
        several = loader is not None and loader._mode == "sequential" and len(self.max_batches) > 1
        return several and self.trainer.world_size > 1

    def _store_until(self, end: int) -> None:
        """Store the outputs of the loaders before `end`, also of those that gave batches to other ranks only.

        Ranks do so before the next loader's first batch: what waits for the others' values is of one loader only.
        """
        if end <= self._to_store or not self._is_exchanged_by_loader():
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


# as in loops.py
LeanEvaluationLoop.__name__ = _EvaluationLoop.__name__
LeanPredictionLoop.__name__ = _PredictionLoop.__name__
