"""Accumulate what `self.log` stores under one key, and combine what several ranks have accumulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, TypeAlias, cast

import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _Sync
from torch import Tensor
from torchmetrics import Metric

from ...strategies.core.devices import scalar
from ...strategies.sharding.whole import map_tensors

Entry: TypeAlias = dict[str, Any]
"""A series as plain data; its `sums` are None for a metric object, which keeps its own state."""

_KEPT = (torch.float32, torch.float64)
_EXACT = 2**24
"""Up to here whole numbers are exact in float32."""

START = {"mean": 0.0, "sum": 0.0, "max": -inf, "min": inf}
_OVER_PARTS: dict[str, Callable[[Any], Any]] = {"mean": sum, "sum": sum, "max": max, "min": min}
_WITH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.max, "min": torch.min}
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


@dataclass
class Sums:
    """What the values of a key add up to.

    Args:
        kind: `mean`, `sum`, `max`, `min`, or `own` for a value of rank 0 that is not combined.
        value: the sum of the values, for a mean each times its weight; or the largest or smallest.
        weight: the sum of the weights.
    """

    kind: str
    value: Any
    weight: Any = 0

    def result(self) -> float:
        """The value of the key, nan for a mean of nothing."""
        if self.kind != "mean":
            return self.value
        return self.value / self.weight if self.weight else nan

    def divided(self, num_ranks: int) -> "Sums":
        """What each of several ranks has to hold for all of them to have these sums."""
        parts = 1 if self.kind in ("max", "min") else num_ranks
        return Sums(self.kind, self.value / parts, self.weight / parts)


def combine(parts: Sequence[Sums]) -> Sums:
    """Combine the sums of several ranks, of a step or of an epoch."""
    kind = parts[0].kind
    if kind == "own":
        return parts[0]
    return Sums(kind, _OVER_PARTS[kind](part.value for part in parts), sum(part.weight for part in parts))


class Series:
    """The accumulator of one key.

    Args:
        meta: the arguments of `self.log`, in Lightning's form.
        value: the first value, a tensor or a torchmetrics metric, which keeps its state itself.

    Attributes:
        last: the last step's value: a copy, or a number that no tensor was made of yet.
        logged: in an evaluation whose ranks share batches the last value with what it counts for; see `LeanResults`.
        options: the arguments of `self.log` with which further values are added without Lightning's checks; or None.
    """

    def __init__(self, meta: _Metadata, value: Any) -> None:
        self.meta, self.value = meta, value
        self.is_tensor = isinstance(value, Tensor)
        self.device: torch.device = value.device
        self.kind = meta.reduce_fx.__name__
        self.on_step, self.on_epoch = meta.on_step, meta.on_epoch
        self.shared = self.is_tensor and self.on_step and meta.sync.should and not meta.sync.rank_zero_only
        self.counts_samples = self.is_tensor and self.kind == "mean" and self.on_epoch
        self.options: tuple[Any, ...] | None = None
        self._size, self._weight = 0, scalar(0.0, self.device, torch.float32)
        self._begin()

    def _begin(self) -> None:
        self.has_reset = False
        self.last: Any = None
        self.logged: Any = None
        self.computed: Any = None
        self._dtype = torch.float32
        self.sums = Sums(self.kind, scalar(START[self.kind], self.device, default_dtype()))

    @property
    def cumulated_batch_size(self) -> Any:
        """What the epoch's mean divides by, under Lightning's name."""
        return self.sums.weight

    def reset(self) -> None:
        """Begin a new epoch."""
        if not self.is_tensor:
            self.value.reset()
        self._begin()
        self.has_reset = True

    def add(self, value: Any, size: Any, waits: bool) -> bool:
        """Store a value as the last one, and accumulate it unless it `waits` for the end of the step.

        Args:
            value: a tensor of one element, a number, or this series' metric.
            size: its weight in a mean.

        Returns:
            False if the value's kind or device differs from the series'; nothing is done then.
        """
        if type(value) is Tensor or isinstance(value, Tensor):
            if value.dtype not in _KEPT or value.device != self.device or not self.is_tensor:
                return False
            copy = value.detach() if value.requires_grad else value
            if waits or self.on_step or self.kind != "mean":  # since the value may be modified in place later
                copy = copy.clone()
            if copy.dim():
                if copy.numel() != 1:
                    return False
                copy = copy.squeeze()
        elif type(value) is float and self.is_tensor:
            copy: Any = value
            if waits or self.on_epoch:
                copy = scalar(value, self.device, default_dtype())
            else:
                self._dtype = default_dtype()  # which `64-true` sets within the step only
        elif self.is_tensor or value is not self.value:  # which is a metric then
            return False
        else:
            copy = cast(Metric, value)._forward_cache
        self.last, self.computed, self.has_reset = copy, None, False
        if self.is_tensor and self.on_epoch and not waits:
            self._accumulate(copy, size)
        return True

    def _accumulate(self, copy: Tensor, size: Any) -> None:
        sums = self.sums
        if self.kind != "mean":
            sums.value = _WITH[self.kind](sums.value, copy)
            return
        if type(size) is int and size <= _EXACT:  # kept on the device: a product with a number takes twice as long
            if size != self._size:
                self._size, self._weight = size, scalar(size, self.device, torch.float32)
            sums.value = sums.value + copy * self._weight
        else:
            sums.value = sums.value + copy * (size.to(copy) if isinstance(size, Tensor) else size)
        sums.weight = sums.weight + size

    def count(self, copy: Tensor, weight: Any) -> None:
        """Accumulate a value that has waited for the end of the step."""
        if self.on_epoch:
            self._accumulate(copy, weight)
            self.computed = None

    def step_value(self) -> Any:
        """The last step's value; None if there is none."""
        if type(self.last) is float:
            self.last = scalar(self.last, self.device, self._dtype)
        return self.last if self.on_step else None

    def of_epoch(self, reduce: Any = _Sync.no_op) -> Tensor:
        """This rank's value of the epoch, or, with a function that reduces tensors over ranks in place, that of all."""
        value = reduce(self.sums.value.clone())
        if self.kind != "mean":
            return value
        return value / reduce(torch.as_tensor(self.sums.weight, device=self.device).clone())

    def compute(self) -> Any:
        """The epoch's value, reduced over ranks by Lightning's own strategies; metrics gather their own states."""
        if self.computed is None:
            self.computed = self.of_epoch(self.meta.sync) if self.is_tensor else self.value.compute()
        return self.computed

    def to(self, *args: Any, **kwargs: Any) -> "Series":
        """Move all data to a device."""
        if not self.is_tensor:
            self.value = self.value.to(*args, **kwargs)
        for owner, name in ((self.sums, "value"), (self.sums, "weight"), (self, "last"), (self, "computed")):
            if isinstance(tensor := getattr(owner, name), Tensor):
                setattr(owner, name, tensor.to(*args, **kwargs))
        self.device = self.sums.value.device if self.is_tensor else self.value.device
        self._size = 0
        return self

    def entry(self) -> Entry:
        """Describe it as plain data; tensors stay where they are."""
        meta, sync = self.meta, self.meta.sync
        return {
            "meta": {name: getattr(meta, name) for name in _META},
            "reduce_fx": self.kind if self.is_tensor else None,
            "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op},
            "sums": dict(vars(self.sums)) if self.is_tensor else None,
            "last": self.step_value() if self.is_tensor else None,
            "has_reset": self.has_reset,
        }

    @staticmethod
    def of(entry: Entry, sync: _Sync, value: Tensor | Metric) -> "Series":
        """Make one of what `entry` returned, without its sums; `value` is on its device, or its metric."""
        reduction = {"reduce_fx": entry["reduce_fx"]} if entry["reduce_fx"] else {}
        meta = _Metadata(**entry["meta"], **reduction)
        meta.sync = sync
        return Series(meta, value)

    def load(self, entry: Entry) -> "Series":
        """Go on with what `entry` returned, in this version's form."""
        self.sums = Sums(**map_tensors(entry["sums"], lambda tensor: tensor.to(self.device)))
        last = entry["last"]
        self.last = last.to(self.device) if isinstance(last, Tensor) else last
        self.has_reset = entry["has_reset"]
        return self


def of_earlier_version(entry: Mapping[str, Any]) -> Entry:
    """Read an entry that a checkpoint has; those of the first versions kept other names."""
    if "sums" in entry:
        return {**entry}
    state = entry["state"]
    sums = {"value": state["value"], "weight": state.get("cumulated_batch_size", 0), "kind": entry["reduce_fx"]}
    return {**entry, "sums": sums, "last": state.get("_forward_cache")}


def on_other_ranks(ranks: Sequence[dict[str, Entry]], num_ranks: int) -> dict[str, Entry]:
    """Combine what several ranks had accumulated to what each of another number of them has to hold."""
    keys = dict.fromkeys(key for results in ranks for key in results)
    return {
        key: _part([of_earlier_version(results[key]) for results in ranks if key in results], num_ranks) for key in keys
    }


def _part(entries: Sequence[Entry], num_ranks: int) -> Entry:
    counted, first = [entry for entry in entries if not entry["has_reset"]], entries[0]
    if not counted or not first["meta"]["on_epoch"] or first["sync"]["rank_zero_only"]:
        return first
    sums = combine([Sums(**entry["sums"]) for entry in counted]).divided(num_ranks)
    return {**first, "sums": vars(sums), "has_reset": False}


def default_dtype() -> torch.dtype:
    """The dtype of values that are logged as numbers, or as tensors narrower than float32."""
    dtype = torch.get_default_dtype()
    return dtype if dtype in _KEPT else torch.float32
