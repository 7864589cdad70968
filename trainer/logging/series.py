"""Accumulate what `self.log` stores under one key, and combine what several ranks have accumulated."""

from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Any, TypeAlias, cast

import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _Sync
from torch import Tensor
from torchmetrics import Metric

from ...strategies.core.devices import scalar

Entry: TypeAlias = dict[str, Any]
"""A series as plain data; its `sums` are None for a metric object, which keeps its own state."""

_KEPT = (torch.float32, torch.float64)

START = {"mean": 0.0, "sum": 0.0, "max": -inf, "min": inf}
_WITH = {"sum": torch.add, "max": torch.max, "min": torch.min}
_OVER = {"mean": torch.sum, "sum": torch.sum, "max": torch.amax, "min": torch.amin}
_META = [field.name for field in fields(_Metadata) if field.name not in ("reduce_fx", "_sync")]


def combine(kind: str, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The value and the weight of all ranks, of tensors of shape (ranks,); the values of a mean are sums."""
    return _OVER[kind](values, 0), weights.sum()


class Series:
    """The accumulator of one key: of tensors, or of a torchmetrics metric, which keeps its state itself."""

    def __init__(self, meta: _Metadata, value: Any) -> None:
        self.meta, self.value = meta, value
        self.is_tensor = isinstance(value, Tensor)
        self.device: torch.device = value.device
        self.kind = meta.reduce_fx.__name__
        self.on_step, self.on_epoch = meta.on_step, meta.on_epoch
        self.counts_samples = self.is_tensor and self.kind == "mean" and self.on_epoch
        self.options: tuple[Any, ...] | None = None  # with which values are added without Lightning's checks
        self._begin()

    def _begin(self) -> None:
        self.has_reset = False
        self.last: Any = None  # the last step's value: a copy, or a number that no tensor was made of yet
        self.computed: Any = None  # the epoch's value, once it is known
        self._dtype = torch.float32
        # of the values, for a mean each times its weight; or the largest or smallest
        self.sum, self.weight = scalar(START[self.kind], self.device, default_dtype()), cast(Any, 0)

    @property
    def shared(self) -> bool:
        """Whether a step's value is that of all ranks."""
        sync = self.meta.sync
        return self.is_tensor and self.on_step and sync.should and not sync.rank_zero_only

    def reset(self) -> None:
        """Begin a new epoch."""
        if not self.is_tensor:
            self.value.reset()
        self._begin()
        self.has_reset = True

    def add(self, value: Any, size: Any, waits: bool) -> bool:
        """Store a last value, and accumulate it unless it `waits`; False, and nothing, if it is of another kind."""
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
        if self.is_tensor and not waits:
            self.count(copy, size)
        return True

    def count(self, copy: Tensor, size: Any) -> None:
        """Accumulate a value, with its weight in a mean, if the epoch's is asked for."""
        if not self.on_epoch:
            return
        self.computed = None
        if self.kind != "mean":
            self.sum = _WITH[self.kind](self.sum, copy)
            return
        self.weight = self.weight + size
        self.sum = self.sum + copy * (size.to(copy) if isinstance(size, Tensor) else size)

    def step_value(self) -> Any:
        """The last step's value; None if there is none."""
        if type(self.last) is float:
            self.last = scalar(self.last, self.device, self._dtype)
        return self.last if self.on_step else None

    def of_epoch(self, reduce: Any = _Sync.no_op) -> Tensor:
        """This rank's value of the epoch, or, with a function that reduces tensors over ranks in place, that of all."""
        value = reduce(self.sum.clone())
        if self.kind != "mean":
            return value
        return value / reduce(torch.as_tensor(self.weight, device=self.device).clone())

    def compute(self) -> Any:
        """The epoch's value, reduced over ranks by Lightning's own strategies; metrics gather their own states."""
        if self.computed is None:
            self.computed = self.of_epoch(self.meta.sync) if self.is_tensor else self.value.compute()
        return self.computed

    def to(self, *args: Any, **kwargs: Any) -> "Series":
        """Move all data to a device."""
        for name in ("sum", "weight", "last", "computed", *(() if self.is_tensor else ("value",))):
            if isinstance(own := getattr(self, name), (Tensor, Metric)):
                setattr(self, name, own.to(*args, **kwargs))
        self.device = self.sum.device if self.is_tensor else self.value.device
        return self

    def entry(self) -> Entry:
        """Describe it as plain data; tensors stay where they are."""
        meta, sync = self.meta, self.meta.sync
        return {
            "meta": {name: getattr(meta, name) for name in _META},
            "reduce_fx": self.kind if self.is_tensor else None,
            "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op},
            "sums": {"kind": self.kind, "value": self.sum, "weight": self.weight} if self.is_tensor else None,
            "last": self.step_value() if self.is_tensor else None,
            "has_reset": self.has_reset,
        }

    @staticmethod
    def of(entry: Entry, sync: _Sync, value: Tensor | Metric, loads: bool) -> "Series":
        """Make one of what `entry` returned, which it `loads`, or not; `value` is on its device, or its metric."""
        entry = of_today(entry)
        reduction = {"reduce_fx": entry["reduce_fx"]} if entry["reduce_fx"] else {}
        meta = _Metadata(**entry["meta"], **reduction)
        meta.sync = sync
        own = Series(meta, value)
        if loads:
            own.sum, own.weight, own.last = (
                kept.to(own.device) if isinstance(kept, Tensor) else kept
                for kept in (entry["sums"]["value"], entry["sums"]["weight"], entry["last"])
            )
            own.has_reset = entry["has_reset"]
        return own


def of_today(entry: Entry) -> Entry:
    """Read an entry that a checkpoint has; those of the first versions kept other names."""
    if "sums" in entry:
        return entry
    state = entry["state"]
    sums = {"value": state["value"], "weight": state.get("cumulated_batch_size", 0), "kind": entry["reduce_fx"]}
    return {**entry, "sums": sums, "last": state.get("_forward_cache")}


def on_other_ranks(ranks: Sequence[dict[str, Entry]], num_ranks: int) -> dict[str, Entry]:
    """Combine what several ranks had accumulated to what each of another number of them has to hold."""
    keys = dict.fromkeys(key for results in ranks for key in results)
    return {key: _part([of_today(results[key]) for results in ranks if key in results], num_ranks) for key in keys}


def _part(entries: Sequence[Entry], num_ranks: int) -> Entry:
    first, counted = entries[0], [entry for entry in entries if not entry["has_reset"]]
    if not counted or not first["meta"]["on_epoch"] or first["sync"]["rank_zero_only"]:
        return first
    kind, own = first["sums"]["kind"], first["sums"]["value"]
    value, weight = combine(kind, *columns(counted))
    value = (value if kind in ("max", "min") else value / num_ranks).to(own)
    sums = {"kind": kind, "value": value, "weight": float(weight) / num_ranks}
    return {**first, "sums": sums, "has_reset": False}


def columns(entries: Sequence[Entry]) -> list[Tensor]:
    """The values of entries, and their weights, each of shape (entries,)."""
    return [
        torch.tensor([float(entry["sums"][name]) for entry in entries], dtype=torch.float64)
        for name in ("value", "weight")
    ]


def default_dtype() -> torch.dtype:
    """The dtype of values that are logged as numbers, or as tensors narrower than float32."""
    dtype = torch.get_default_dtype()
    return dtype if dtype in _KEPT else torch.float32
