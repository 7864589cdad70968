"""Extend Lightning's loop over batches so that a common step costs little; others are left to its own code."""

from collections import OrderedDict
from functools import partial
from time import perf_counter
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loops.fetchers import _DataFetcher
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ...strategies.core.types import Batch
from ...strategies.distributed.group import StopAgreement
from ...strategies.registry import ranks_of
from ..logging.connector import LeanLoggerConnector
from ..logging.exchange import end_step
from ..logging.results import LeanResults
from .evaluation_loops import LeanEvaluationLoop, ValidationStopped
from .step_plan import may_be_lean
from .train_step import AccumulatingOptimization, TrainStep

_LEAST_BATCHES = 10
"""Between two times that hooks are looked up in an epoch, where values are logged more often."""


class LeanTrainingEpochLoop(_TrainingEpochLoop):
    """The loop over the batches of a training epoch, which saves and resumes between two of them."""

    trainer: Any
    data_wait_s = 0.0  # seconds that lean steps have waited for the loader
    _step: TrainStep | None = None
    _has_validated = False
    _stop: StopAgreement | None = None  # by which ranks agree between batches on when to stop

    def __init__(self, trainer: pl.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.automatic_optimization: AccumulatingOptimization = AccumulatingOptimization(trainer)
        self.val_loop = LeanEvaluationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )
        self._results: LeanResults = LeanResults(trainer, training=True)  # pyright: ignore[reportIncompatibleVariableOverride]
        self._connector: LeanLoggerConnector = self.trainer._logger_connector

    @override
    def reset(self) -> None:
        super().reset()
        resumed = self.trainer.fit_loop.resumed
        if self.restarting and resumed.is_between_batches:  # nothing is half done or pending
            self._restarting = self.val_loop._restarting = False
            self.trainer.should_stop = resumed.should_stop  # the rest of the epoch's end is still to come

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        super().run(data_fetcher)
        self.trainer.fit_loop.end_within_epoch()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        fit_loop = self.trainer.fit_loop
        point = fit_loop.begin_epoch(data_fetcher, self.restarting)
        fit_loop.in_section(lambda: super(LeanTrainingEpochLoop, self).on_run_start(data_fetcher))
        if fit_loop.sections is not None:
            fit_loop.sections.reads = True
        self._make_plan(data_fetcher)
        if point == "before_validation":  # do what comes after the batch at which it was stopped
            self.trainer._last_val_time = float("-inf")  # due, also where time decides
            self.on_advance_end(data_fetcher)
        if self._stop is not None:
            self._agree_to_end(self._stop)

    def _agree_to_end(self, stop: StopAgreement) -> None:
        fit_loop = self.trainer.fit_loop
        if stop.is_ending or (self.trainer.should_stop and fit_loop._can_stop_early):
            fit_loop.in_section(fit_loop.agree_to_end)
        else:
            stop.num_passed += 1

    def _make_plan(self, data_fetcher: _DataFetcher) -> None:
        self.automatic_optimization.begin_epoch()
        ranks, self._step = ranks_of(self.trainer.strategy), None
        self._stop = None if ranks is None else ranks.group.stopping
        if may_be_lean(self.trainer, data_fetcher):
            self._step = TrainStep(self.trainer, data_fetcher, self.automatic_optimization)

    @override
    def teardown(self) -> None:
        self._step = None
        super().teardown()

    @property
    @override
    def done(self) -> bool:
        progress = self.batch_progress
        if (
            not self._restarting
            and not self.trainer.should_stop
            and not progress.is_last_batch
            and progress.current.ready != self.trainer.fit_loop.max_batches
            and (self.max_steps == -1 or self.global_step < self.max_steps)
        ):
            return False  # as Lightning finds after many more calls
        return super().done

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: Lightning's synchronizes the host every step. See `ResumingFitLoop.stop_at`."""

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Lightning's, which its own loop calls between the step and the hooks that read what was logged in it."""
        if self._results.pending is not None:
            end_step(self._results)
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        sections = self.trainer.fit_loop.sections
        if sections is None:
            self._advance(data_fetcher)
        else:
            sections.step(partial(self._advance, data_fetcher))

    def _advance(self, data_fetcher: _DataFetcher) -> None:
        trainer, progress = self.trainer, self.batch_progress
        batch_idx = progress.current.ready
        # before the first batch of an epoch a run can't be resumed exactly
        asked = self._stop is not None and self._stop.signal is not None
        if batch_idx and (asked or trainer._signal_connector.received_sigterm):
            trainer.fit_loop.stop_at("between_batches")
        step = self._step_of(data_fetcher, batch_idx)
        if step is None:
            super().advance(data_fetcher)
            return
        asked_s = perf_counter()
        batch = step.next_batch()
        self.data_wait_s += perf_counter() - asked_s
        progress.is_last_batch = data_fetcher.done
        batch = step.move(batch, 0)
        progress.increment_ready()
        self._connector.on_batch_start(batch, None, self._results)

        output: Any = None
        skips = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            if "on_train_batch_start" in step.work:
                skips = step.call("on_train_batch_start", batch, batch_idx) == -1
                if skips and (ranks := ranks_of(trainer.strategy)) is not None:  # one alone would leave the others
                    ranks.group.wait(f"-1 of on_train_batch_start in batch {batch_idx}", "Return -1 on all ranks.")
            step.strategy.on_train_batch_start(batch, batch_idx)
            if skips:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                output = self._optimize(step, batch, batch_idx)
        if trainer.fit_loop.sections is None:
            self._finish_batch(step, output, batch, batch_idx, skips)
        else:
            finish = partial(self._finish_batch, step, output, batch, batch_idx, skips)
            trainer.fit_loop.sections.run(finish, counts=False)

    def _step_of(self, data_fetcher: _DataFetcher, batch_idx: int) -> TrainStep | None:
        """The lean step, whose hooks are looked up if it is time to; None where Lightning's own must run."""
        step, trainer = self._step, self.trainer
        if step is None or self._restarting or step.module is not trainer.strategy._lightning_module:
            return None
        every = max(trainer.log_every_n_steps or 0, _LEAST_BATCHES)
        if self._has_validated or (batch_idx and not batch_idx % every) or step.stale():
            self._has_validated = False
            if not may_be_lean(trainer, data_fetcher):
                self._step = None
                return None
            step.resolve()
        self.val_loop._restarting = False
        return step

    def _optimize(self, step: TrainStep, batch: Batch, batch_idx: int) -> Any:
        if step.fits():
            stepping = self.trainer.accumulate_grad_batches == 1 or not self._should_accumulate()
            return step.run(batch, batch_idx, stepping)
        kwargs = self._build_kwargs(OrderedDict(), batch, batch_idx)
        if step.module.automatic_optimization:
            return self.automatic_optimization.run(self.trainer.optimizers[0], batch_idx, kwargs)
        return self.manual_optimization.run(kwargs)

    def _finish_batch(self, step: TrainStep, output: Any, batch: Batch, batch_idx: int, skipped: bool) -> None:
        self.batch_progress.increment_processed()
        if step.strategy.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skipped:
            raise StopIteration
        if self._results.pending is not None:
            end_step(self._results)
        if "on_train_batch_end" in step.work:
            step.call("on_train_batch_end", output, batch, batch_idx)
        self._connector.on_batch_end()
        self.batch_progress.increment_completed()
        steps = self.trainer.accumulate_grad_batches == 1 or not self._should_accumulate()
        if steps or not step.module.automatic_optimization:
            self._connector.log_train_step(self._batches_that_stepped + 1)

    @override
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        sections = self.trainer.fit_loop.sections
        if sections is None:
            self._end_advance(data_fetcher)
        else:
            sections.run(partial(self._end_advance, data_fetcher), counts=False)

    def _end_advance(self, data_fetcher: _DataFetcher) -> None:
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        if self._stop is not None:
            self._agree_to_end(self._stop)
        if self._step is None or self._validation_may_be_due():
            self._has_validated = True
            self._connector.settled()
            try:
                super().on_advance_end(data_fetcher)
            except ValidationStopped:
                fit_loop.stop_at("before_validation")
            except SIGTERMException:  # raised by Lightning as its last action here
                fit_loop.stop_at("between_batches")
        elif trainer.accumulate_grad_batches == 1 or not self._should_accumulate():
            if self._step.strategy.lr_scheduler_configs:
                self.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._batches_that_stepped += 1
        if fit_loop._savers:
            fit_loop.between_batches()
        if fit_loop.sections is not None:
            fit_loop.sections.ends |= self.done

    def _validation_may_be_due(self) -> bool:
        """Whether Lightning must decide: at the last batch, on a stop, at an interval, after a restart."""
        trainer, progress = self.trainer, self.batch_progress
        every = trainer.val_check_batch  # None if time decides, inf if a loader of unknown length ends
        if progress.is_last_batch or trainer.should_stop or self._skip_next_val or every is None:
            return True
        if every == float("inf"):
            return isinstance(trainer.limit_train_batches, int)
        counts = progress.total if trainer.check_val_every_n_epoch is None else progress.current
        return counts.ready % every == 0
