"""Hold what one loop logs: a series per key, with this rank's share of the batch in process."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultCollection, _Sync
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.data import _extract_batch_size, extract_batch_size
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.memory import recursive_detach
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from ...strategies.batch.results import is_loss
from ...strategies.batch.run_structures import batch_structure
from ...strategies.core.errors import ConfigError
from ...strategies.core.module_checks import callbacks_of
from ...strategies.data.sampling import Share
from ...strategies.distributed.metrics.sync import RunMetrics
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import ranks_of
from .series import Entry, Series, default_dtype, of_earlier_version


@dataclass(slots=True)
class Logged:
    """A value that this rank logged in the batch in process, until ranks have exchanged what they need of it.

    Args:
        value: what `self.log` received.
        copy: its copy, as it was then; None for a metric object.
        size: samples that it is weighted by, or what was given.
        given: whether `batch_size` was given.
        share: this rank's part of the batch; None if all ranks count the same.
    """

    series: Series
    value: Any
    copy: Tensor | None
    size: Any
    given: bool
    share: Share | None


def step_of(meta: _Metadata) -> tuple[str, int]:
    """The step that logs a key, and the index of its loader."""
    return meta.fx.partition(".")[0], meta.dataloader_idx or 0


class LeanResults(_ResultCollection):
    """What one loop has logged, by the keys of Lightning's collection.

    Args:
        training: whether it belongs to the training loop.

    Attributes:
        quick: the series whose further values need none of Lightning's checks, by (hook, name, index of the loader).
        share: this rank's part of the batch in process; None if all ranks count the same.
        pending: what this rank has logged in the batch in process; None outside of one, and where ranks share none.
        logs_steps: whether a value was logged by step.
        waits_for_epoch: whether evaluation logged one with `sync_dist=True`, which is exchanged when the epoch ends.
        shares_steps: whether a step value of a metric was logged with `sync_dist=True`.
    """

    def __init__(self, trainer: pl.Trainer, training: bool) -> None:
        super().__init__(training)
        self.trainer = trainer
        self.quick: dict[tuple[str, str, int | None], Series] = {}
        self.share: Share | None = None
        self.pending: list[Logged] | None = None
        self.logs_steps = self.waits_for_epoch = self.shares_steps = False
        self.restored: set[str] = set()

    @cached_property
    def ranks(self) -> RankStrategy | None:
        """The strategy, if there are several ranks that share batches; it is the same as long as the trainer runs."""
        return ranks_of(self.trainer.strategy) if self.trainer.world_size > 1 else None

    @property
    def metric_steps(self) -> RunMetrics | None:
        """What computes the values of metrics for one global batch; None if ranks do not share batches."""
        ranks = ranks_of(self.trainer.strategy)
        return None if ranks is None else ranks.contract.metrics

    @override
    @torch.compiler.disable  # as Lightning's
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a value that has passed the checks of `LightningModule.log`."""
        given, group = options.pop("batch_size", None), options.pop("sync_dist_group", None)
        syncs, alone = options.pop("sync_dist", False), options.pop("rank_zero_only", False)
        options.pop("sync_dist_fn", None)
        by_step, by_epoch = options.get("on_step", False), options.get("on_epoch", True)
        syncs = syncs or (by_step and not alone and self._decides(name, by_epoch))
        key = self.key(fx, name, options.get("add_dataloader_idx", True))
        meta = _Metadata(fx + key.removeprefix(f"{fx}.{name}"), name, dataloader_idx=self.dataloader_idx, **options)
        meta.sync = _Sync(_should=syncs, fn=self.reduce, _group=group, rank_zero_only=alone)
        value = self._floating(recursive_detach(value), meta)
        series = self._series(key, meta, value)
        self.logs_steps = self.logs_steps or by_step
        if syncs and by_step and isinstance(value, Metric) and self.metric_steps is not None:
            self.shares_steps = True
        waits = syncs and by_step and not self.training and self.ranks is not None
        self.waits_for_epoch |= waits
        series.counts_samples |= waits and series.is_tensor and series.kind == "mean"
        self.store(series, value, given)
        if self.reduces_at_once(series):
            series.last = meta.sync(series.last.clone())

    def key(self, fx: str, name: str, indexed: bool) -> str:
        """The key of a series, as Lightning makes it; `indexed` by its loader, if there are several."""
        return f"{fx}.{name}.{self.dataloader_idx}" if indexed and self.dataloader_idx is not None else f"{fx}.{name}"

    def _series(self, key: str, meta: _Metadata, value: Any) -> Series:
        series: Series | None = self.get(key)
        if series is None:
            series = self[key] = Series(meta, value)  # pyright: ignore[reportArgumentType]  # in place of Lightning's metric
        elif key in self.restored:  # let it be reduced as this run does; one process, which saved, reduces nothing
            self.restored.discard(key)
            series.meta = meta
            series.shared = series.is_tensor and series.on_step and meta.sync.should and not meta.sync.rank_zero_only
        elif meta != series.meta:
            raise MisconfigurationException(
                f"You called `self.log({meta.name}, ...)` twice in `{meta.fx}` with different arguments. This is not "
                "allowed"
            )
        if not series.is_tensor:
            series.value = value
        if series.device != value.device:
            series.to(value.device)
        return series

    @staticmethod
    def _floating(value: Any, meta: _Metadata) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            rank_zero_warn(
                f"You called `self.log({meta.name!r}, ...)` in your `{meta.fx}` but the value needs to be floating to "
                f"be reduced. Converting it to {torch.get_default_dtype()}. Convert it to a floating-point tensor."
            )
        return value if value.dtype in (torch.float32, torch.float64) else value.to(default_dtype())

    def store(self, series: Series, value: Any, given: Any) -> bool:
        """Add a value to its series, now or, with several ranks, at the end of the step.

        Args:
            given: the `batch_size` that it was logged with; None for the number of samples.

        Returns:
            False if the value's kind or device differs from the series'; nothing is done then.
        """
        size: Any = 1
        if series.counts_samples:
            size = given if given is not None else self.batch_size or self._count_samples()
        pending, share, before = self.pending, self.share, series.last
        if not series.add(value, size, pending is not None):
            return False
        if pending is not None and (series.is_tensor or series.on_step):
            copy = series.last if series.is_tensor else None
            pending.append(Logged(series, value, copy, size, given is not None, share))
            if not self.training:
                series.logged = pending[-1]
            has_none = share is not None and not share.num and not series.shared
            if has_none and before is not None:  # it shows the last batch that it has seen
                series.last = before
        return True

    def flush(self) -> list[Logged]:
        """Accumulate what waits for the end of the step, the loss by the module's `loss_weight`, and return it."""
        taken = self.pending or []
        if not taken:
            return []
        self.pending = []
        for logged in taken:  # what a rank without samples has logged in their place counts for nothing
            if logged.copy is not None and (logged.share is None or logged.share.num):
                logged.series.count(logged.copy, self.weight(logged))
        return taken

    def _scale(self, logged: Logged) -> Tensor | None:
        """This rank's fraction of the batch times the ranks, of a loss that is not weighed by samples."""
        weighed = self.ranks.contract.shares.weighed_losses if self.training and self.ranks is not None else ()
        if not weighed or logged.series.kind != "mean":
            return None
        return next((scale for own, scale in weighed if any(is_loss(logged.value, one) for one in own)), None)

    def step_weight(self, logged: Logged) -> Any:
        """The weight of a value among those that ranks have logged in the batch; 0 on a rank without samples."""
        scale, share = self._scale(logged), logged.share
        return (1 if share is None else share.num) if scale is None else scale

    def weight(self, logged: Logged) -> Any:
        """The weight of a value in a mean over batches and ranks.

            samples     no `batch_size` was given, or this part's own number of samples
            constant    one number for the global batch: each part has its fraction of it
            given       other numbers, such as that of the valid labels that the loss is a mean over

        The verifier knows which it is; of what hooks log, and of streams, a part's own number of samples is known.
        """
        scale, share, num_ranks = self._scale(logged), logged.share, self.trainer.world_size
        size = samples = logged.size
        if scale is not None:
            samples = scale * (size if share is None else share.total / num_ranks)
        if not logged.given or (share is None and isinstance(size, int)):
            return samples
        if share is None or not isinstance(size, int):  # counted, perhaps on the device
            return size
        assert self.ranks is not None
        meta = logged.series.meta
        reading = self.ranks.contract.reader.values.reading(*step_of(meta), meta.name)
        if reading == "constant":
            return size * (share.num / share.total if scale is None else scale / num_ranks)
        return samples if reading == "samples" and size == share.num else size

    def _count_samples(self) -> int:
        if self.batch_size is None and self.batch is not None:
            self.batch_size = _rows(self.batch)
        if self.batch_size is None and self.batch is not None:
            sizes = [size for size in _extract_batch_size(self.batch) if size is not None]
            loader: Any = getattr(self.trainer._active_loop, "_combined_loader", None)
            if loader is not None and loader._mode != "sequential" and len(loader.flattened) > 1:
                self.batch_size = next(iter(sizes), None)  # of several loaders the first one's count, as in Lightning
            elif len(set(sizes)) > 1:  # as the batch is cut where its tensors disagree
                with suppress(ConfigError):
                    structure = batch_structure(self.trainer, self.dataloader_idx or 0)
                    self.batch_size = structure.num_samples(self.batch) or None
            self.batch_size = self.batch_size or extract_batch_size(self.batch)
        return 1 if self.batch_size is None else self.batch_size

    def _decides(self, name: str, on_epoch: Any) -> bool:
        """Whether a scheduler or callback monitors a step value, by which ranks would decide each for itself."""
        if not self.training or self.ranks is None:
            return False
        configs, callbacks = self.trainer.lr_scheduler_configs, callbacks_of(self.trainer)
        by_step = {config.monitor for config in configs if config.interval == "step"}
        monitored = {config.monitor for config in configs} | {getattr(one, "monitor", None) for one in callbacks}
        return name in by_step or f"{name}_step" in monitored or (name in monitored and not on_epoch)

    def reduces_at_once(self, series: Series) -> bool:
        """Whether a step's value is reduced where it is logged: under Lightning's own strategies."""
        return series.shared and self.ranks is None and self.trainer.world_size > 1

    def reduce(self, value: Tensor, group: Any = None, reduce_op: str | None = "mean") -> Tensor:
        """Reduce a value over ranks as Lightning does; strategies whose ranks share batches exchange it themselves."""
        if self.ranks is not None:
            return value
        return self.trainer.strategy.reduce(value, group=group, reduce_op=reduce_op)  # pyright: ignore[reportReturnType]  # of a tensor a tensor

    def shown_name(self, series: Series, on_step: bool) -> str:
        """The name that loggers and the bar show."""
        return self._forked_name(series, on_step)[1]  # pyright: ignore[reportArgumentType]  # in place of Lightning's metric

    def _get_cache(self, series: Any, on_step: bool) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # Lightning's is static
        """The step's value, or the epoch's: until ranks have exchanged it, this rank's own, and none of a metric."""
        if on_step:
            return series.step_value()
        if not series.on_epoch:
            return None
        if series.computed is None and self.ranks is not None:
            return series.of_epoch() if series.is_tensor else None
        if series.computed is None and self.trainer.world_size > 1 and series.is_tensor and not series.meta.sync.should:
            rank_zero_warn(
                f"It is recommended to use `self.log({series.meta.name!r}, ..., sync_dist=True)` when logging on epoch "
                "level in distributed setting to accumulate the metric across devices."
            )
        value = series.compute()
        if not isinstance(value, Tensor):
            raise ValueError(
                f"The `.compute()` return of the metric logged as {series.meta.name!r} must be a tensor. Found {value}"
            )
        return value

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        connector: Any = self.trainer._logger_connector
        connector.settle()
        super().reset(metrics, fx)
        if self.pending:  # Lightning drops what the first batch logged before another hook did
            self.pending[:] = [logged for logged in self.pending if not logged.series.has_reset]

    @override
    def to(self, *args: Any, **kwargs: Any) -> "LeanResults":
        for series in self.values():
            series.to(*args, **kwargs)
        return self

    def capture(self) -> dict[str, Entry]:
        """Read all values logged as tensors or numbers, by their keys; they stay where they are."""
        self.flush()
        all_series: Any = self.items()
        return {key: series.entry() for key, series in all_series if series.is_tensor}

    def restore(self, saved: dict[str, Entry]) -> None:
        """Go on with what `capture` read, as if `self.log` had been called."""
        device = self.trainer.strategy.root_device
        if saved:  # otherwise the first `self.log` of a loop resets its means
            self.trainer._logger_connector._first_loop_iter = False
        for key, entry in saved.items():
            entry = of_earlier_version(entry)
            sync = _Sync(fn=self.reduce, **entry["sync"])  # as when such a value is logged
            self[key] = Series.of(entry, sync, torch.zeros((), device=device)).load(entry)  # pyright: ignore[reportArgumentType]  # in place of Lightning's metric
            self.restored.add(key)


def _rows(batch: Any) -> int | None:
    """The rows of a tensor, or of all tensors in a list, without a walk through the batch; None of anything else."""
    items = batch if type(batch) is list or type(batch) is tuple else (batch,)
    size = None
    for item in items:
        if type(item) is not Tensor or not item.dim() or (size is not None and item.shape[0] != size):
            return None
        size = item.shape[0]
    return size
