"""Extend Lightning's loops of validation, test and prediction as `loops.py` does its training loops."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from ...strategies.core.private import of_lightning
from ...strategies.core.private.of_lightning import EvaluationLoop, PredictionLoop
from ...strategies.core.types import Batch
from ...strategies.registry import ranks_of
from ..checkpoint.clean_points import SeparateEvaluation
from ..logging.connector import LeanResults
from ._eval_step import StepPlan, evaluate, predict, step_plan


def _inference(loop: EvaluationLoop | PredictionLoop) -> AbstractContextManager[Any]:
    """Inference mode, as on one device, where Lightning only turns gradients off because the ranks use gloo.

    torch's gloo takes inference tensors since 2.13. Steps that are exchanges themselves, as FSDP's, stay as they are.
    """
    ranks = ranks_of(loop.trainer.strategy)
    return torch.inference_mode() if loop.inference_mode and ranks and not ranks.evaluates_in_step else nullcontext()


def _run_rest(loop: Any, plan: StepPlan, step: Callable[[Batch, int], None]) -> None:
    """Run the other batches of a single loader, with their numbers, without Lightning's loop around each.

    Raises:
        StopIteration: the loader has ended before it was known, as Lightning's loop expects.
    """
    loader = plan.loader
    if loader is None or loop.restarting:
        return
    fetcher, progress, number = loader.fetcher, loop.batch_progress, loader.num_read
    while not fetcher.done:
        batch = next(loader)
        progress.is_last_batch = fetcher.done
        step(batch, number)
        number += 1


class LeanEvaluationLoop(SeparateEvaluation):
    """Validation or test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._results = LeanResults(self.trainer, training=False)
        self._plan: StepPlan | None = None
        self._loader = self._to_store = 0  # which gave the last batch, and whose outputs are to be stored next

    @override
    def run(self) -> list[Any]:
        with _inference(self):
            return super().run()

    @override
    def reset(self) -> None:
        super().reset()
        self._plan = step_plan(self, "test" if self.trainer.testing else "validation")
        self._loader = self._to_store = 0

    @override
    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        self._loader = dataloader_idx
        if self._plan is None:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            self.after_batch()
            return
        self._evaluate(self._plan, dataloader_idx, batch, batch_idx)
        self._has_run = not self._plan.sanity_checks
        _run_rest(self, self._plan, partial(self._evaluate, self._plan, 0))

    def _evaluate(self, plan: StepPlan, dataloader_idx: int, batch: Any, batch_idx: int) -> None:
        evaluate(self, plan, batch, batch_idx, dataloader_idx)
        if self.is_within_fit:
            self.after_batch()

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
        return super().on_run_end()

    def _is_exchanged_by_loader(self) -> bool:
        """Whether ranks exchange the outputs of several loaders, one after the other."""
        loader = self._combined_loader
        several = loader is not None and of_lightning.mode(loader) == "sequential" and len(self.max_batches) > 1
        return several and self.trainer.world_size > 1

    def _store_until(self, end: int) -> None:
        """Store the outputs of the loaders before `end`, also of those that gave batches to other ranks only."""
        results, current = self._results, self._results.dataloader_idx
        for index in range(self._to_store, end):
            if index == self._loader or self.max_batches[index]:
                results.dataloader_idx = index
                super()._store_dataloader_outputs()
        self._to_store, results.dataloader_idx = max(self._to_store, end), current

    @override
    def teardown(self) -> None:
        self._plan = None
        super().teardown()


class LeanPredictionLoop(PredictionLoop):
    """Prediction."""

    _plan: StepPlan | None = None

    @override
    def run(self) -> Any:
        with _inference(self):
            return super().run()

    @override
    def reset(self) -> None:
        super().reset()
        self._plan = step_plan(self, "predict")

    @override
    def _predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        if self._plan is None:
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        else:
            predict(self, self._plan, batch, batch_idx, dataloader_idx)
        if self._plan is not None:
            plan = self._plan
            _run_rest(self, plan, lambda rest, number: predict(self, plan, rest, number, 0))

    @override
    def teardown(self) -> None:
        self._plan = None
        super().teardown()


# as in loops.py
LeanEvaluationLoop.__name__ = EvaluationLoop.__name__
LeanPredictionLoop.__name__ = PredictionLoop.__name__
