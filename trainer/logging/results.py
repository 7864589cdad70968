"""Hold what one loop logs, as Lightning's collection of results does, with ranks' shares of the batch in process."""

from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from ...strategies.core.errors import ConfigError
from ...strategies.core.private import of_lightning, of_metrics
from ...strategies.core.private.of_lightning import ResultMetric
from ...strategies.core.types import Batch
from ...strategies.data.sampling import Share
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import ranks_of
from ._epoch_sync import is_shared_by, own_values
from ._eval_step_sync import NUM_SAMPLES
from ._rank_log import GIVEN, GivenSizes, Logged
from ._step_sync import metric_steps_of
from .collection_slot import CollectionSlot
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
        self.collections: dict[tuple[str, MetricCollection, int | None], CollectionSlot] = {}
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

    @override
    def __setitem__(self, key: str, metric: ResultMetric) -> None:
        if metric.is_tensor:  # Lightning's own way looks for tensors in all that its attributes hold
            vars(metric)["to"] = partial(Metric.to, metric)
        super().__setitem__(key, metric)

    def _decides(self, name: str, on_epoch: Any) -> bool:
        """Whether a scheduler or callback monitors a step value, by which ranks would decide each for itself."""
        if not self.training or self.ranks is None:
            return False
        configs, callbacks = self.trainer.lr_scheduler_configs, of_lightning.callbacks(self.trainer)
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
        for slot in (*self.slots.values(), *self.collections.values()):
            slot.settle()
