"""Hold what one loop logs: a series per key, with this rank's share of the batch in process."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultCollection, _Sync
from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.data import extract_batch_size
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
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import ranks_of
from .series import Entry, Series, default_dtype


@dataclass(slots=True)
class Logged:
    """A value that this rank logged in the batch in process, until ranks have exchanged what they need of it."""

    series: Series
    value: Any
    copy: Tensor
    size: Any
    """Samples that it is weighted by, or the `batch_size`, if that was given."""
    given: bool
    share: Share | None
    """This rank's part of the batch; None if all ranks count the same."""


def step_of(meta: _Metadata) -> tuple[str, int]:
    """The step that logs a key, and the index of its loader."""
    return meta.fx.partition(".")[0], meta.dataloader_idx or 0


class LeanResults(_ResultCollection):
    """What one loop has logged, by the keys of Lightning's collection."""

    def __init__(self, trainer: pl.Trainer, training: bool) -> None:
        super().__init__(training)
        self.trainer = trainer
        # the series whose further values need none of Lightning's checks, by (hook, name, index of the loader)
        self.quick: dict[tuple[str, str, int | None], Series] = {}
        self.share: Share | None = None
        # what this rank has logged in the batch in process; None outside of one, and where ranks share none
        self.pending: list[Logged] | None = None
        self.logs_steps = False
        self._restored: set[str] = set()  # the keys of series that this run has not logged yet
        # of batches of evaluation, by loader and index, what depends on what other ranks have logged
        self.waiting: list[tuple[tuple[int, int], Tensor, list[Logged]]] = []
        self.told: set[str] = set()

    @cached_property
    def ranks(self) -> RankStrategy | None:
        """The strategy, if there are several ranks that share batches; it is the same as long as the trainer runs."""
        return ranks_of(self.trainer.strategy) if self.trainer.world_size > 1 else None

    @override
    @torch.compiler.disable  # as Lightning's
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a value that has passed the checks of `LightningModule.log`."""
        given, group = options.pop("batch_size", None), options.pop("sync_dist_group", None)
        syncs, alone = options.pop("sync_dist", False), options.pop("rank_zero_only", False)
        options.pop("sync_dist_fn", None)
        if group is not None and self.ranks is not None:
            raise ConfigError(f"self.log({name!r}, sync_dist_group=...): all ranks share a batch. Leave out the group.")
        by_step = options.get("on_step", False)
        decides = by_step and not alone and self._decides(name, options.get("on_epoch", True))
        if decides and isinstance(value, Metric):
            raise ConfigError(
                f"{name} is monitored, and in a step each rank has its own. Log it with on_step=False, on_epoch=True."
            )
        syncs = syncs or decides
        key = self.key(fx, name, options.get("add_dataloader_idx", True))
        meta = _Metadata(fx + key.removeprefix(f"{fx}.{name}"), name, dataloader_idx=self.dataloader_idx, **options)
        meta.sync = _Sync(_should=syncs, fn=self.reduce, _group=group, rank_zero_only=alone)
        value = recursive_detach(value)
        if isinstance(value, Tensor) and value.dtype not in (torch.float32, torch.float64):
            value = value.to(default_dtype())
        series = self._series(key, meta, value)
        self.logs_steps |= by_step
        self.store(series, series.value, given)
        if self.reduces_at_once(series):
            series.last = meta.sync(series.last.clone())

    def key(self, fx: str, name: str, indexed: bool) -> str:
        """The key of a series, as Lightning makes it; `indexed` by its loader, if there are several."""
        return f"{fx}.{name}.{self.dataloader_idx}" if indexed and self.dataloader_idx is not None else f"{fx}.{name}"

    def _series(self, key: str, meta: _Metadata, value: Any) -> Series:
        series: Series | None = self.get(key)
        if series is None:
            series = self[key] = Series(meta, value)  # pyright: ignore[reportArgumentType]  # in place of Lightning's metric
            is_own = meta.on_step and meta.sync.should and not (self.training and series.is_tensor)
            if is_own and self.ranks is not None:
                rank_zero_info(
                    f"self.log({meta.name!r}, on_step=True, sync_dist=True) in {meta.fx}: ranks exchange this when the "
                    f"epoch ends. {'Each rank shows its own value of a step' if self.training else 'Steps have none'}."
                )
        elif key in self._restored:  # let it be reduced as this run does; one process, which saved, reduces nothing
            self._restored.discard(key)
            series.meta = meta
        elif meta != series.meta:
            raise MisconfigurationException(
                f"You called `self.log({meta.name}, ...)` twice in `{meta.fx}` with different arguments. This is not "
                "allowed"
            )
        series.value = value
        if series.device != value.device:
            series.to(value.device)
        return series

    def store(self, series: Series, value: Any, given: Any) -> bool:
        """Add a value, with the `batch_size` that was given, now or, with several ranks, at the step's end."""
        size: Any = 1
        if series.counts_samples:
            size = given if given is not None else self.batch_size or self._count_samples()
        pending, share, before = self.pending, self.share, series.last
        if not series.add(value, size, pending is not None):
            return False
        if pending is not None:
            if series.is_tensor:
                pending.append(Logged(series, value, series.last, size, given is not None, share))
            if share is not None and not share.num and before is not None and not series.shared:
                series.last = before  # without samples it shows the last batch that it has seen
        return True

    def flush(self) -> None:
        """Accumulate what waits for the end of the step, the loss by the module's `loss_weight`."""
        taken = self.pending or ()
        if taken:
            self.pending = []
        for logged in taken:  # what a rank without samples has logged in their place counts for nothing
            if logged.share is None or logged.share.num:
                logged.series.count(logged.copy, self._weight(logged))

    def scale(self, logged: Logged) -> Tensor | None:
        """This rank's fraction of the batch times the ranks, of a loss that is not weighed by samples."""
        weighed = self.ranks.contract.shares.weighed_losses if self.training and self.ranks is not None else ()
        if not weighed or logged.series.kind != "mean":
            return None
        return next((scale for own, scale in weighed if any(is_loss(logged.value, one) for one in own)), None)

    def _weight(self, logged: Logged) -> Any:
        """The weight of a value in a mean over batches and ranks; the verifier knows what a `batch_size` is."""
        scale, share, num_ranks = self.scale(logged), logged.share, self.trainer.world_size
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
        if reading == "constant":  # for the global batch: each part has its fraction of it
            return size * (share.num / share.total if scale is None else scale / num_ranks)
        return samples if reading == "samples" and size == share.num else size

    def _count_samples(self) -> int:
        if self.batch_size is None and self.batch is not None:
            self.batch_size = _rows(self.batch)
            if self.batch_size is None:
                with suppress(ConfigError):  # as the batch is cut
                    structure = batch_structure(self.trainer, self.dataloader_idx or 0)
                    self.batch_size = structure.num_samples(self.batch)
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

    def _get_cache(self, series: Any, on_step: bool) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # Lightning's is static
        """The step's value, or the epoch's: until ranks have exchanged it, this rank's own, and none of a metric."""
        if on_step:
            waits = not self.training and self.ranks is not None and series.meta.sync.should
            return None if waits else series.step_value()
        if not series.on_epoch:
            return None
        if series.computed is None and self.ranks is not None:
            return series.of_epoch() if series.is_tensor else None
        value = series.compute()
        if not isinstance(value, Tensor):
            raise ValueError(
                f"The `.compute()` return of the metric logged as {series.meta.name!r} must be a tensor. Found {value}"
            )
        return value

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        connector: Any = self.trainer._logger_connector
        connector.settled()
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
        if saved:  # otherwise the first `self.log` of a loop resets its means
            self.trainer._logger_connector._first_loop_iter = False
        for key, entry in saved.items():
            self.make(key, entry, _Sync(fn=self.reduce, **entry["sync"]), loads=True)  # as when such a value is logged

    def make(self, key: str, entry: Entry, sync: _Sync, loads: bool = False) -> Series:
        """Make a series that this rank has not logged."""
        value: Any = torch.zeros((), device=self.trainer.strategy.root_device)
        if entry["reduce_fx"] is None:
            value = self.trainer.lightning_module.get_submodule(entry["meta"]["metric_attribute"])
        series = self[key] = Series.of(entry, sync, value, loads)  # pyright: ignore[reportArgumentType]  # in place of Lightning's metric
        self._restored.add(key)
        return series


def _rows(batch: Any) -> int | None:
    """The rows of a tensor, or of all tensors in a list, without a walk through the batch; None of anything else."""
    items = batch if type(batch) is list or type(batch) is tuple else (batch,)
    size = None
    for item in items:
        if type(item) is not Tensor or not item.dim() or (size is not None and item.shape[0] != size):
            return None
        size = item.shape[0]
    return size
