"""Collect logged metrics lazily: values stay on their device until they are read.

Lightning collects all metrics, and copies those of the progress bar to the host, at the end of every step. Here the end
of a step only records that there is something to collect. It is collected before anything changes it, or when it is
read: by a logger at its step, the progress bar at its refresh, a callback at any time.
"""

from contextlib import nullcontext
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from ...strategies.core.errors import ConfigError
from ...strategies.core.module_log import ModuleLog
from ...strategies.core.private import of_lightning, of_metrics
from ...strategies.core.private.of_lightning import ResultMetric
from ...strategies.core.types import Batch
from ...strategies.data.sampling import Share
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import ranks_of
from ._epoch_sync import is_shared_by, own_values, share
from ._eval_step_sync import NUM_SAMPLES, EvalStepSync, combine
from ._rank_log import GIVEN, GivenSizes, Logged, reweigh_losses
from ._step_sync import fill_empty, metric_steps_of, reduce_together, share_step_values
from .slots import Slot


class LeanResults(of_lightning.ResultCollection):
    """Lightning's collection of logged values, with a slot for each key after its first value.

    Args:
        training: whether it belongs to the training loop.
    """

    def __init__(self, trainer: pl.Trainer, training: bool) -> None:
        super().__init__(training)
        self.trainer = trainer
        self.slots: dict[tuple[str, str, int | None], Slot] = {}
        self.logs_steps = False
        self.waits_for_epoch = False
        """Whether evaluation logged a step value with `sync_dist=True`, which is exchanged at the end of the epoch."""
        self.share: Share | None = None
        """This rank's part of the batch in process; None if all ranks count the same."""
        self.tracked: list[Logged] | None = None
        """What this rank logged in the training batch in process; None if ranks do not share batches, or outside it."""
        self.shares_steps = False
        """Whether a step value of a metric was logged with `sync_dist=True`."""
        self.restored: dict[str, Any] = {}
        """Entries that a checkpoint had, by key, until they are logged again."""
        self.shared: dict[int, ResultMetric] = {}
        """Entries logged by step in the training batch in process whose values the ranks have yet to combine, by id."""
        self._logs = False

    @cached_property
    def ranks(self) -> RankStrategy | None:
        """The strategy, if there are several ranks that share batches; it is the same as long as the trainer runs."""
        return ranks_of(self.trainer.strategy) if self.trainer.world_size > 1 else None

    @override
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("on_step") and not kwargs.get("rank_zero_only") and self._decides(name, kwargs.get("on_epoch")):
            kwargs["sync_dist"] = True
        if kwargs.get("sync_dist"):
            kwargs["sync_dist_fn"] = self.reduce
            if kwargs.get("on_step") and isinstance(value, Metric):
                steps = metric_steps_of(self.trainer.strategy)
                if steps is not None and of_metrics.forward_cache(value) is not None:
                    steps.verify_whole(name)
                self.waits_for_epoch |= steps is not None and not self.training
                self.shares_steps = True
        if self.restored:
            self._renew_sync(fx, name, kwargs)
        self._logs = True
        # pyright can't resolve Lightning's `torch.compiler.disable`
        super().log(fx, name, value, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._logs = False
        self.logs_steps = self.logs_steps or bool(kwargs.get("on_step"))

    def _decides(self, name: str, on_epoch: Any) -> bool:
        """Whether a scheduler or callback monitors a step value, by which ranks would decide each for itself."""
        if not self.training or self.ranks is None:
            return False
        configs, callbacks = self.trainer.lr_scheduler_configs, self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]  # a list, untyped
        by_step = {config.monitor for config in configs if config.interval == "step"}
        monitored = {config.monitor for config in configs} | {getattr(one, "monitor", None) for one in callbacks}
        return name in by_step or f"{name}_step" in monitored or (name in monitored and not on_epoch)

    def key(self, fx: str, name: str, indexed: bool) -> str:
        """The key of an entry, as Lightning makes it.

        Args:
            indexed: whether the index of the loader is added to it, if there are several.
        """
        return f"{fx}.{name}.{self.dataloader_idx}" if indexed and self.dataloader_idx is not None else f"{fx}.{name}"

    def reduce(self, value: Tensor, group: Any = None, reduce_op: str | None = "mean") -> Tensor:
        """Reduce a value over ranks as Lightning does, but for one that is logged by step.

        In training it is reduced at the end of the step, in evaluation at that of the epoch.
        """
        if self._logs and self.training:
            return value
        if not self.training and is_shared_by(self.trainer):
            self.waits_for_epoch = True
            return value
        return self.trainer.strategy.reduce(value, group=group, reduce_op=reduce_op)  # pyright: ignore[reportReturnType]  # of a tensor a tensor

    def _renew_sync(self, fx: str, name: str, options: dict[str, Any]) -> None:
        """Let an entry that a checkpoint had be reduced as this run does; one process, which saved, reduces nothing."""
        metric = self.restored.pop(self.key(fx, name, options.get("add_dataloader_idx", True)), None)
        if metric is not None:
            sync = metric.meta.sync
            sync.fn, sync.should, sync.group = options["sync_dist_fn"], options["sync_dist"], options["sync_dist_group"]

    @override
    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        given = batch_size is not None or self.batch_size is not None
        shared = self.trainer.world_size > 1
        waits = not self.training and meta.sync.should
        if shared and not given and self.batch is not None and value.is_tensor and meta.is_mean_reduction:
            if meta.on_epoch or waits:
                self._verify_countable(meta.name, self.batch)
            if waits:
                self.batch_size = extract_batch_size(self.batch)  # Lightning counts only for means over an epoch
        size = super()._extract_batch_size(value, batch_size, meta)
        if waits:
            vars(value)[NUM_SAMPLES] = size
        elif shared and value.is_tensor and meta.on_step and meta.sync.should and not meta.sync.rank_zero_only:
            self.shared[id(value)] = value
        return size

    @staticmethod
    def _verify_countable(name: str, batch: Batch) -> None:
        sizes = sorted({size for size in of_lightning.extract_batch_sizes(batch) if size is not None})
        if len(sizes) > 1:
            raise ConfigError(
                f"self.log({name!r}): the number of samples, by which ranks are weighted, is ambiguous: the batch has "
                f"tensors of {' and '.join(map(str, sizes))} rows. Pass batch_size= to self.log."
            )

    def note_given(self, metric: Any, value: Any, size: Any) -> None:
        """Note that a value of the batch in process, of which this rank has a share, was logged with `batch_size`."""
        if metric.is_tensor and metric.meta.on_epoch and metric.meta.is_mean_reduction:
            vars(metric).setdefault(GIVEN, GivenSizes()).add(value, size, self.share)

    @override
    def metrics(self, on_step: bool) -> Any:
        self.settle()
        alone = not on_step and is_shared_by(self.trainer)
        with own_values(self) if alone else nullcontext():
            return super().metrics(on_step)

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        connector: Any = of_lightning.logger_connector(self.trainer)
        connector.settle()
        self.settle()
        super().reset(metrics, fx)
        for metric in self.values():
            if metric.has_reset:
                vars(metric).pop(GIVEN, None)
        # Lightning drops what the first batch logged before another hook did
        self.shared = {key: metric for key, metric in self.shared.items() if not metric.has_reset}
        if self.tracked:
            self.tracked[:] = [logged for logged in self.tracked if not logged.metric.has_reset]

    @override
    def to(self, *args: Any, **kwargs: Any) -> "LeanResults":
        self.settle()
        super().to(*args, **kwargs)
        return self

    def settle(self) -> None:
        """Write the values held back by the slots to Lightning's metrics."""
        for slot in self.slots.values():
            slot.settle()


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
        results: Any = of_lightning.results(self.trainer)
        self.start_batch(results, batch, dataloader_idx)

    @override
    def on_batch_end(self) -> None:
        results: Any = of_lightning.results(self.trainer)
        self.finish_batch(results)

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
