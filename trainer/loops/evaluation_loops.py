"""Extend Lightning's loops of validation, test and prediction as `loops.py` does its training loops."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.prediction_loop import _PredictionLoop
from typing_extensions import override

from ...strategies.core.types import Batch
from ...strategies.registry import ranks_of
from ..checkpoint.separate_evaluation import SeparateEvaluation
from ..logging.results import LeanResults
from ._eval_step import StepPlan, run_step, step_plan
from .explained_errors import only_loaders_end


class PlannedLoop(_Loop):
    """What validation, test and prediction share: the mode in which they run, and a plan of their steps."""

    inference_mode: bool
    _plan: StepPlan | None = None

    def run(self) -> Any:
        """Run in inference mode where Lightning would only turn gradients off because the ranks use gloo.

        torch 2.13's gloo takes inference tensors. Steps that are exchanges themselves, as FSDP's, stay without.
        """
        ranks = ranks_of(self.trainer.strategy)
        infers = self.inference_mode and ranks is not None and not ranks.sync.evaluates_together
        with torch.inference_mode() if infers else nullcontext():
            return cast("Any", super()).run()

    def reset(self) -> None:
        """Plan the steps of the next run."""
        cast("Any", super()).reset()
        self._plan = step_plan(cast("Any", self))

    def run_planned(self, plan: StepPlan, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        """Run a step and, of a single loader, all others, without Lightning's loop around each.

        Raises:
            StopIteration: the loader has ended before it was known, as Lightning's loop expects.
        """
        loop, loader = cast("Any", self), plan.loader
        stops = getattr(self, "is_within_fit", False)  # between two batches, if a signal asks for it
        while True:
            run_step(loop, plan, batch, batch_idx, dataloader_idx)
            if stops:
                loop.after_batch()
            if loader is None or loop.restarting or loader.fetcher.done:
                return
            batch_idx, batch = loader.combined._idx, next(loader)
            loop.batch_progress.is_last_batch = loader.fetcher.done

    def teardown(self) -> None:
        """Forget the plan, which holds the run's objects."""
        self._plan = None
        cast("Any", super()).teardown()


class LeanEvaluationLoop(PlannedLoop, SeparateEvaluation):
    """Validation or test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._results = LeanResults(self.trainer, training=False)
        self._loader = self._to_store = 0  # which gave the last batch, and whose outputs are to be stored next

    @override
    def reset(self) -> None:
        super().reset()
        self._loader = self._to_store = 0

    @override
    @only_loaders_end
    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        self._loader = dataloader_idx
        if self._plan is None:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            self.after_batch()
        else:
            self._has_run = not self._plan.sanity_checks
            self.run_planned(self._plan, batch, batch_idx, dataloader_idx)

    @override
    def _store_dataloader_outputs(self) -> None:
        if self._is_exchanged_by_loader():
            self._store_until(self._loader + 1)
        else:
            super()._store_dataloader_outputs()

    @override
    def on_run_end(self) -> list[Any]:
        if self._is_exchanged_by_loader():
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
        """Store the outputs of the loaders before `end`, also of those that gave batches to other ranks only."""
        results, current = self._results, self._results.dataloader_idx
        for index in range(self._to_store, end):
            if index == self._loader or self.max_batches[index]:
                results.dataloader_idx = index
                super()._store_dataloader_outputs()
        self._to_store, results.dataloader_idx = max(self._to_store, end), current


class LeanPredictionLoop(PlannedLoop, _PredictionLoop):
    """Prediction."""

    @override
    @only_loaders_end
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
