"""Collect logged metrics lazily: values stay on their device until they are read.

Lightning collects all metrics, and copies those of the progress bar to the host, at the end of every step. Here the end
of a step only records that there is something to collect. It is collected before anything changes it, or when it is
read: by a logger at its step, the progress bar at its refresh, a callback at any time.
"""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from typing_extensions import override

from ...strategies.core.module_log import ModuleLog
from ...strategies.core.private import of_lightning
from ...strategies.core.types import Batch
from ._epoch_sync import share
from ._eval_step_sync import EvalStepSync, combine
from ._rank_log import reweigh_losses
from ._step_sync import fill_empty, metric_steps_of, reduce_together, share_step_values
from .results import LeanResults


def _collected(name: str) -> Any:
    """An attribute whose metrics are collected before it is read or replaced."""

    def read(connector: "LeanLoggerConnector") -> dict[str, Any]:
        connector.settle()
        return connector.collected[name]

    def write(connector: "LeanLoggerConnector", metrics: dict[str, Any]) -> None:
        connector.settle()
        connector.collected[name] = metrics

    return property(read, write)


class LeanLoggerConnector(of_lightning.LoggerConnector):
    """Lightning's logger connector, except that the metrics of a step are collected when they are read."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.batch_results: LeanResults | None = None
        """The results of the loop that is processing a batch; None between batches."""
        self._unread: LeanResults | None = None
        self._evaluated = EvalStepSync()
        self._weightless: ModuleLog | None = None
        self.collected: dict[str, dict[str, Any]] = {}
        self.is_exchanged = False
        """Whether ranks have exchanged all that was logged before the end of the evaluation that comes next."""
        super().__init__(trainer)

    def start_batch(self, results: LeanResults, batch: Batch, dataloader_idx: int | None) -> None:
        """Like Lightning's `on_batch_start`, for a loop that has its results at hand."""
        if self._first_loop_iter is None:
            self._first_loop_iter = True
        elif self._first_loop_iter is True:
            self._first_loop_iter = False
        if results.dataloader_idx != dataloader_idx:
            self.settle()
            results.dataloader_idx = dataloader_idx
        if results.shared:
            results.shared.clear()  # of an interrupted step
        ranks = results.ranks
        if ranks is not None:
            share = results.share = ranks.contract.shares.current
            if results.training:
                results.tracked = []
            log = vars(self.trainer.lightning_module).get("log") if share is not None and not share.num else None
            if isinstance(log, ModuleLog):  # what hooks log has no weight either, as in a step without samples
                log.receiver, self._weightless = log.without_weight, log
        self.batch_results = results
        results.batch = batch
        results.batch_size = None

    def enters(self, fx: str) -> bool:
        """Learn which hook logs, unless it is one whose values Lightning would reset by its own check of the call."""
        if self._current_fx != fx:
            if self._first_loop_iter is not False:
                return False
            self._current_fx = fx
        return True

    def exchange(self, results: LeanResults) -> None:
        """Bring the values that this rank logged in the batch to what they are for the global batch."""
        ranks, tracked = results.ranks, results.tracked
        if tracked and ranks is not None and ranks.contract.shares.weighed_losses:
            reweigh_losses(tracked, ranks.contract.shares.weighed_losses, results.share, ranks.world_size)
        if results.shared:
            reduce = self.trainer.strategy.reduce if ranks is None else ranks.contract.reduce_logged
            reduce_together(results.shared.values(), reduce)  # pyright: ignore[reportArgumentType]  # of a tensor a tensor
            results.shared.clear()
        if tracked is None:
            return
        if results.share is not None and results.share.some_empty:
            results.settle()
            fill_empty(results, results.share.num)
        if tracked and results.shares_steps and ranks is not None:
            share_step_values(ranks, tracked)
        tracked.clear()

    def finish_batch(self, results: LeanResults) -> None:
        """Like Lightning's `on_batch_end`, for a loop that has its results at hand; metrics are collected later."""
        if results.tracked is not None or results.shared:
            self.exchange(results)
        if results and self._unread is not results:
            self.settle()
            self._unread = results
        results.batch = None
        results.batch_size = None
        self._leave_batch()

    def _leave_batch(self) -> None:
        results, self.batch_results = self.batch_results, None
        if results is not None:
            results.tracked = None
        if self._weightless is not None:
            self._weightless.receiver = self._weightless = None

    def log_train_step(self, num_steps: int) -> None:
        """Send a step's values to the loggers every `log_every_n_steps` steps.

        Args:
            num_steps: number of batches that stepped the optimizer, including this one.
        """
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        if (every and (num_steps % every == 0 or trainer.should_stop)) or trainer.fast_dev_run:
            self.log_metrics(self.metrics["log"])

    def settle(self) -> None:
        """Collect the metrics of the last step, if not done yet."""
        results, self._unread = self._unread, None
        if results is not None:
            metrics = results.metrics(on_step=True)
            self._progress_bar_metrics.update(metrics["pbar"])
            self._callback_metrics.update(metrics["callback"])
            self._logged_metrics.update(metrics["log"])

    @override
    def on_batch_start(self, batch: Batch, dataloader_idx: int | None = None) -> None:
        self.start_batch(of_lightning.results(self.trainer), batch, dataloader_idx)

    @override
    def on_batch_end(self) -> None:
        self.finish_batch(of_lightning.results(self.trainer))

    @override
    def epoch_end_reached(self) -> None:
        self.settle()
        self._leave_batch()
        super().epoch_end_reached()
        if not self.is_exchanged:
            self._share()
        self.is_exchanged = False

    @override
    def on_epoch_end(self) -> None:
        self._share()  # values logged by the epoch's last hooks
        super().on_epoch_end()

    @override
    def update_eval_step_metrics(self, step: int) -> None:
        results: Any = of_lightning.results(self.trainer)
        if results.waits_for_epoch:
            results.settle()
            self._evaluated.add(self.trainer, results, step)
        else:
            super().update_eval_step_metrics(step)

    def _share(self) -> None:
        results: Any = of_lightning.results(self.trainer)
        if results is not None:
            results.settle()
            steps = share(self.trainer, results, self._evaluated.take())
            combined = combine(steps, self.trainer.lightning_module, metric_steps_of(self.trainer.strategy))
            if combined:
                self._tell_evaluated(combined, results)

    def _tell_evaluated(self, combined: list[tuple[int, dict[str, Tensor]]], results: Any) -> None:
        """Log what evaluation has logged by step, and let the bar show the last of it."""
        steps = [metric for metric in results.values() if metric.meta.on_step]
        logged = {of_lightning.forked_name(results)(metric, True)[1] for metric in steps if metric.meta.logger}
        shown = {of_lightning.forked_name(results)(metric, True)[1] for metric in steps if metric.meta.prog_bar}
        for step, values in combined:
            self.log_metrics({name: value for name, value in values.items() if name in logged}, step=step)
            self._progress_bar_metrics.update({name: float(values[name]) for name in values if name in shown})

    @override
    def reset_results(self) -> None:
        self.settle()
        self._leave_batch()
        super().reset_results()

    # Lightning keeps three plain dictionaries
    _callback_metrics: Any = _collected("callback")
    _logged_metrics: Any = _collected("log")
    _progress_bar_metrics: Any = _collected("pbar")
