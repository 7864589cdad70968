"""Extend Lightning's loops so that a common step costs as little as a hand-written one.

Everything less common is left to Lightning's own code, called through `super()`: restarts, profilers,
`dataloader_iter`, manual optimization, the validation loop around its steps, schedulers, the decisions when to validate
and when to stop.
"""

from collections import OrderedDict
from functools import partial
from time import perf_counter
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loops.fetchers import _DataFetcher
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ...strategies.core.types import Batch
from ...strategies.distributed.group import StopAgreement
from ...strategies.registry import ranks_of
from ..checkpoint.clean_points import ResumingFitLoop
from ..logging.connector import LeanLoggerConnector
from ..logging.results import LeanResults
from ._batch_fetch import OneLoader, may_read_lean
from ._train_step import TrainStep
from .accumulation import AccumulatingOptimization
from .evaluation_loops import LeanEvaluationLoop, ValidationStopped
from .hook_plan import HookPlan, may_be_lean

TRAIN_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip

_LEAST_BATCHES = 10
"""Between two times that hooks are resolved in an epoch, where values are logged more often."""


class LeanFitLoop(ResumingFitLoop):
    """The loop over epochs."""

    _batches_before = 0

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        loop: Any = self.epoch_loop
        self._batches_before, loop.automatic_optimization.num_none = loop.batch_progress.total.started, 0

    @property
    def took_no_step(self) -> bool:
        """Whether `training_step` returned None for every batch of the run."""
        loop: Any = self.epoch_loop
        return 0 < loop.automatic_optimization.num_none == loop.batch_progress.total.started - self._batches_before


class LeanTrainingEpochLoop(_TrainingEpochLoop):
    """The loop over the batches of a training epoch, which saves and resumes between two of them."""

    def __init__(self, trainer: pl.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.automatic_optimization: AccumulatingOptimization = AccumulatingOptimization(trainer)
        self.val_loop = LeanEvaluationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )
        self._results: LeanResults = LeanResults(self.trainer, training=True)  # pyright: ignore[reportIncompatibleVariableOverride]
        connector: Any = trainer._logger_connector
        self._connector: LeanLoggerConnector = connector
        self.data_wait_s = 0.0  # seconds that lean steps have waited for the loader
        self._step: TrainStep | None = None
        self._has_validated = False
        self._stop: StopAgreement | None = None  # by which ranks agree between batches on when to stop

    @property
    def _fit_loop(self) -> LeanFitLoop:
        fit_loop = self.trainer.fit_loop
        assert isinstance(fit_loop, LeanFitLoop)
        return fit_loop

    @override
    def reset(self) -> None:
        super().reset()
        if self.restarting and self._fit_loop.resumed.is_between_batches:  # nothing is half done or pending
            self._restarting = self.val_loop._restarting = False
            # the rest of the epoch's end is still to come
            self.trainer.should_stop = self._fit_loop.resumed.should_stop

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        super().run(data_fetcher)
        self._fit_loop.end_within_epoch()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        point = self._fit_loop.begin_epoch(data_fetcher, self.restarting)
        self._fit_loop.in_section(lambda: super(LeanTrainingEpochLoop, self).on_run_start(data_fetcher))
        if self._fit_loop.sections is not None:
            self._fit_loop.sections.reads = True
        self._make_plan(data_fetcher)
        if point == "before_validation":  # do what comes after the batch at which it was stopped
            vars(self.trainer)["_last_val_time"] = float("-inf")  # due, also where time decides
            self.on_advance_end(data_fetcher)
        if self._stop is not None:
            self._agree_to_end(self._stop)

    def _agree_to_end(self, stop: StopAgreement) -> None:
        if stop.is_ending or (self.trainer.should_stop and self._fit_loop._can_stop_early):
            self._fit_loop.in_section(self._fit_loop.agree_to_end)
        else:
            stop.num_passed += 1

    def _make_plan(self, data_fetcher: _DataFetcher) -> None:
        if self.trainer.accumulate_grad_batches > 1:
            self.automatic_optimization.verify()
        self._step = None
        ranks = ranks_of(self.trainer.strategy)
        self._stop = None if ranks is None else ranks.group.stopping
        if may_read_lean(self.trainer, data_fetcher):
            plan, loader = HookPlan(self.trainer, TRAIN_HOOKS), OneLoader.of(data_fetcher)
            self._step = TrainStep(plan, loader or data_fetcher, self.automatic_optimization)

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
            return False
        return super().done

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: Lightning's synchronizes the host every step. See `ResumingFitLoop.stop_at`."""

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Lightning's, which its own loop calls between the step and the hooks that read what was logged in it."""
        if self._results.pending is not None:
            self._connector.exchange(self._results)
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == interval and config.reduce_on_plateau == update_plateau_schedulers:
                super().update_lr_schedulers(interval, update_plateau_schedulers)
                return

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        sections = self._fit_loop.sections
        if sections is None:
            self._take_batch(data_fetcher)
        else:
            sections.step(partial(self._take_batch, data_fetcher))

    def _take_batch(self, data_fetcher: _DataFetcher) -> None:
        fit_loop: Any = self.trainer.fit_loop
        # before the first batch of an epoch a run can't be resumed exactly
        if self.batch_progress.current.ready and (
            (self._stop is not None and self._stop.armed) or self.trainer._signal_connector.received_sigterm
        ):
            fit_loop.stop_at("between_batches")
        step, module = self._step, self.trainer.strategy._lightning_module
        if step is None or self._restarting or step.plan.module is not module:
            super().advance(data_fetcher)
            return
        ready = self.batch_progress.current.ready
        every = max(self.trainer.log_every_n_steps or 0, _LEAST_BATCHES)  # pyright: ignore[reportAttributeAccessIssue]  # Lightning sets it undeclared
        if self._has_validated or (ready and not ready % every) or step.plan.stale():
            self._has_validated = False
            if not may_be_lean(self.trainer):
                self._step = None
                super().advance(data_fetcher)
                return
            step.resolve()
        # Lightning's setter visits all child loops
        if self.val_loop._restarting:
            self.val_loop.restarting = False
        self._advance(step, data_fetcher)

    def _advance(self, step: TrainStep, data_fetcher: _DataFetcher) -> None:
        plan, progress, connector = step.plan, self.batch_progress, self._connector
        total: Any = progress.total
        current: Any = progress.current
        asked_s = perf_counter()
        batch = step.next_batch()
        self.data_wait_s += perf_counter() - asked_s
        batch_idx = current.ready
        progress.is_last_batch = data_fetcher.done
        batch = step.move(batch, 0)
        total.ready += 1
        current.ready += 1
        connector.on_batch_start(batch, None, self._results)

        output: Any = None
        skip = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            if "on_train_batch_start" in plan.work:
                skip = plan.call("on_train_batch_start", batch, batch_idx) == -1
                if skip and (ranks := ranks_of(self.trainer.strategy)) is not None:  # one alone would leave the others
                    ranks.group.wait(f"-1 of on_train_batch_start in batch {batch_idx}", "Return -1 on all ranks.")
            if step.tells_strategy:
                plan.call_as("on_train_batch_start", plan.strategy.on_train_batch_start, batch, batch_idx)
            if skip:
                progress.increment_by(0, is_last_batch=True)
            else:
                total.started += 1
                current.started += 1
                output = self._optimize(step, batch, batch_idx)
        self._fit_loop.in_section(partial(self._finish_batch, step, output, batch, batch_idx, skip), counts=False)

    def _finish_batch(self, step: TrainStep, output: Any, batch: Batch, batch_idx: int, skipped: bool) -> None:
        plan = step.plan
        total: Any = self.batch_progress.total
        current: Any = self.batch_progress.current
        total.processed += 1
        current.processed += 1
        if plan.strategy.lr_scheduler_configs and self._stepping():
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skipped:
            raise StopIteration
        if self._results.pending is not None:
            self._connector.exchange(self._results)
        if "on_train_batch_end" in plan.work:
            plan.call("on_train_batch_end", output, batch, batch_idx)
        self._connector.on_batch_end()
        total.completed += 1
        current.completed += 1
        if self._stepping() or not plan.module.automatic_optimization:
            self._connector.log_train_step(self._batches_that_stepped + 1)

    def _stepping(self) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        parts, progress = self.trainer.accumulate_grad_batches, self.batch_progress
        ready = progress.current.ready
        if parts == 1 or ready % parts == 0:
            return True
        is_last = progress.is_last_batch or ready == self.trainer.fit_loop.max_batches
        return is_last and not self._should_accumulate()

    def _optimize(self, step: TrainStep, batch: Batch, batch_idx: int) -> Any:
        automatic = step.plan.module.automatic_optimization
        if automatic and step.fits() and not self.automatic_optimization._skip_backward:
            return step.run(batch, batch_idx, self._stepping())
        kwargs = self._build_kwargs(OrderedDict(), batch, batch_idx)
        if automatic:
            return self.automatic_optimization.run(self.trainer.optimizers[0], batch_idx, kwargs)
        return self.manual_optimization.run(kwargs)

    @override
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        self._fit_loop.in_section(partial(self._end_advance, data_fetcher), counts=False)

    def _end_advance(self, data_fetcher: _DataFetcher) -> None:
        if self._stop is not None:
            self._agree_to_end(self._stop)
        if self._step is None or self._validation_may_be_due():
            self._has_validated = True
            self._connector.settle()
            try:
                super().on_advance_end(data_fetcher)
            except ValidationStopped:
                self._fit_loop.stop_at("before_validation")
            except SIGTERMException:  # raised by Lightning as its last action here
                self._fit_loop.stop_at("between_batches")
        elif self._stepping():
            if self._step.plan.strategy.lr_scheduler_configs:
                self.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._batches_that_stepped += 1
        fit_loop: Any = self.trainer.fit_loop
        if fit_loop._savers:
            fit_loop.between_batches()
        if fit_loop.sections is not None:
            fit_loop.sections.ends |= self.done

    def _validation_may_be_due(self) -> bool:
        """Whether Lightning must decide: at the last batch, on a stop, at an interval, after a restart."""
        trainer: Any = self.trainer
        if self.batch_progress.is_last_batch or trainer.should_stop or self._skip_next_val:
            return True
        every = trainer.val_check_batch
        if trainer._val_check_time_interval is not None or every is None:
            return True
        if every == float("inf"):
            every = trainer.limit_train_batches
            return isinstance(every, int) and every > 0 and (self.batch_idx + 1) % every == 0
        by_epoch = trainer.check_val_every_n_epoch is not None
        ready = self.batch_progress.current.ready if by_epoch else self.batch_progress.total.ready
        return ready % every == 0

    @override
    def on_iteration_done(self) -> None:
        if self._restarting or self._loaded_from_state_dict or self._resuming_from_checkpoint:
            super().on_iteration_done()


# Profilers name actions after the loop's class: keep Lightning's names.
LeanFitLoop.__name__ = _FitLoop.__name__
LeanTrainingEpochLoop.__name__ = _TrainingEpochLoop.__name__
