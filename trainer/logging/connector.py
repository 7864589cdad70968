"""Collect logged metrics lazily: values stay on their device until they are read.

Lightning collects all metrics, and copies those of the progress bar to the host, at the end of every step. Here the end
of a step only records that there is something to collect. It is collected before anything changes it, or when it is
read: by a logger at its step, the progress bar at its refresh, a callback at any time.
"""

from functools import cached_property
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.trainer.connectors.logger_connector import _LoggerConnector
from typing_extensions import override

from ...strategies.core.module_log import ModuleLog
from ...strategies.core.types import Batch
from .exchange import Exchange
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


class LeanLoggerConnector(_LoggerConnector):
    """Lightning's logger connector, except that the metrics of a step are collected when they are read."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.batch_results: LeanResults | None = None
        """The results of the loop that is processing a batch; None between batches."""
        self._unread: LeanResults | None = None
        self._weightless: ModuleLog | None = None
        self.collected: dict[str, dict[str, Any]] = {}
        self.is_exchanged = False
        """Whether ranks have exchanged all that was logged before the end of the evaluation that comes next."""
        super().__init__(trainer)

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.trainer)

    @override
    def on_batch_start(
        self, batch: Batch, dataloader_idx: int | None = None, results: LeanResults | None = None
    ) -> None:
        """Begin a batch; a loop that has its results at hand gives them, which are found slowly."""
        if results is None:
            results = cast(LeanResults, self.trainer._results)
        if self._first_loop_iter is None:
            self._first_loop_iter = True
        elif self._first_loop_iter is True:
            self._first_loop_iter = False
        if results.dataloader_idx != dataloader_idx:
            self.settle()
            results.dataloader_idx = dataloader_idx
        results.flush()  # of an interrupted step
        ranks, results.pending = results.ranks, None
        if ranks is not None:
            results.pending = []
            self._exchange.begin_batch()
            share = results.share = ranks.contract.shares.current
            log = vars(self.trainer.lightning_module).get("log") if share is not None and not share.num else None
            if isinstance(log, ModuleLog):  # what hooks log has no weight either, as in a step without samples
                log.receiver, self._weightless = log.without_weight, log
        self.batch_results = results
        results.batch = batch
        results.batch_size = None

    def exchange(self, results: LeanResults, early: bool = False) -> None:
        """Bring the values that this rank logged in the training batch to what they are for the global batch.

        What hooks log after an `early` exchange, before the batch's optimizer step, is not a sum over the batch.
        """
        self._exchange.end_step(results)
        self._exchange.has_ended |= early

    @override
    def on_batch_end(self) -> None:
        """End a batch; metrics are collected later."""
        results = self.batch_results
        assert results is not None
        if results.pending is not None:
            (self._exchange.end_step if results.training else self._exchange.end_evaluated)(results)
        if results and self._unread is not results:
            self.settle()
            self._unread = results
        results.batch = None
        results.batch_size = None
        self._leave_batch()

    def _leave_batch(self) -> None:
        results, self.batch_results = self.batch_results, None
        if results is not None:
            results.flush()
            results.pending = None
        if self._weightless is not None:
            self._weightless.receiver = self._weightless = None

    def log_train_step(self, num_steps: int) -> None:
        """Send a step's values to the loggers every `log_every_n_steps` of the batches that stepped the optimizer."""
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
        results: Any = self.trainer._results
        if results.waits_for_epoch and results.ranks is not None:  # not since training gave each whole batches
            self._exchange.keep_step(results, step)
        else:
            super().update_eval_step_metrics(step)

    def _share(self) -> None:
        results = cast(LeanResults | None, self.trainer._results)
        if results is None or results.ranks is None:
            return
        steps = [series for series in results.values() if series.meta.on_step]
        for step, values in self._exchange.end_epoch(results):
            logged = {results.shown_name(series, True) for series in steps if series.meta.logger}
            shown = {results.shown_name(series, True) for series in steps if series.meta.prog_bar}
            self.log_metrics({name: value for name, value in values.items() if name in logged}, step=step)
            self._progress_bar_metrics.update({name: values[name] for name in values if name in shown})

    @override
    def reset_results(self) -> None:
        self.settle()
        self._leave_batch()
        super().reset_results()

    # Lightning keeps three plain dictionaries
    _callback_metrics: Any = _collected("callback")
    _logged_metrics: Any = _collected("log")
    _progress_bar_metrics: Any = _collected("pbar")
