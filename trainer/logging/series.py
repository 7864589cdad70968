"""Accumulate what `self.log` stores under one key, and combine what several ranks have accumulated.

A mean over ranks weights each value by one of three readings, which the ranks choose together:

    samples     no `batch_size` was given, or always the part's own number of samples: by these, or by the `loss_weight`
                of the step if the value is its loss
    constant    one whole number was given by all, for the global batch: each part has its fraction of it
    given       other numbers, such as that of the valid labels that the loss is a mean over
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any, TypeAlias, cast

import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _Sync
from torch import Tensor
from torchmetrics import Metric

from ...strategies.core.devices import scalar
from ...strategies.data.sampling import Share
from ...strategies.sharding.whole import map_tensors

Entry: TypeAlias = dict[str, Any]
"""A series as plain data; its `sums` are None for a metric object, which keeps its own state."""

_KEPT = (torch.float32, torch.float64)
_EXACT = 2**24
"""Up to here whole numbers are exact in float32."""

_START = {"mean": 0.0, "sum": 0.0, "max": -inf, "min": inf}
_OVER_PARTS: dict[str, Callable[[Any], Any]] = {"mean": sum, "sum": sum, "max": max, "min": min}
_WITH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.max, "min": torch.min}
_ADDED = ("value", "weight", "constant_value", "constant_weight", "more_value", "more_weight")
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


@dataclass
class Sums:
    """What the values of a key add up to.

    Args:
        kind: `mean`, `sum`, `max`, `min`, or `own` for a value of rank 0 that is not combined.
        value: sum of the values, for a mean weighted as given, or by samples; or the largest or smallest.
        weight: sum of these weights.
        constant_value: the same sum, if what was given is a constant for the whole batch.
        more_value: what is to be added to `value` if what was given are the numbers of samples.
        smallest: smallest number given that may be a constant; -inf if there was one that can't be.
        own: whether each number given was that of the part's samples.
    """

    kind: str
    value: Any
    weight: Any = 0
    constant_value: Any = 0.0
    constant_weight: Any = 0.0
    more_value: Any = 0.0
    more_weight: Any = 0.0
    smallest: float = inf
    largest: float = -inf
    own: bool = True

    def count(
        self, value: Any, size: Any, given: bool, share: Share | None, scale: Tensor | None, num_ranks: int
    ) -> None:
        """Add a value to a mean of what several ranks log.

        Args:
            size: its weight on this rank, samples or what was given.
            share: this rank's part of the batch; None if all ranks count the same.
            scale: this rank's fraction of the weight of the global batch times the number of ranks, if the value is the
                loss and has another weight than samples.
        """
        samples = size
        if scale is not None:
            samples = scale * (size if share is None else share.total / num_ranks)
        weight = size if given and (share is not None or not isinstance(size, int)) else samples
        self.value = self.value + _times(value, weight)
        self.weight = self.weight + weight
        if given and share is not None:
            self._note(value, size, share, scale, num_ranks)
        elif not isinstance(size, int) or size:
            self.smallest, self.largest = -inf, inf

    def _note(self, value: Any, given: Any, share: Share, scale: Tensor | None, num_ranks: int) -> None:
        """Add a value that was logged with `batch_size` as the other readings have it."""
        if not share.num:
            return
        self.own = self.own and isinstance(given, int) and given == share.num
        if self.own and scale is not None:
            more = scale * (share.total / num_ranks) - given
            self.more_value = self.more_value + _times(value, more)
            self.more_weight = self.more_weight + more
        if not isinstance(given, int):  # counted, perhaps on the device, where reading it would wait
            self.smallest, self.largest = -inf, inf
            return
        self.smallest, self.largest = min(self.smallest, given), max(self.largest, given)
        weight = given * (share.num / share.total if scale is None else scale / num_ranks)
        self.constant_value = self.constant_value + _times(value, weight)
        self.constant_weight = self.constant_weight + weight

    def chosen(self) -> "Sums":
        """The sums as the numbers given are read."""
        if self.smallest == self.largest and not self.own:
            return Sums(self.kind, self.constant_value, self.constant_weight)
        if self.own and self.kind == "mean":
            return Sums(self.kind, self.value + self.more_value, self.weight + self.more_weight)
        return Sums(self.kind, self.value, self.weight)

    def result(self) -> float:
        """The value of the key, nan for a mean of nothing."""
        sums = self.chosen()
        if self.kind != "mean":
            return sums.value
        return sums.value / sums.weight if sums.weight else nan

    def divided(self, num_ranks: int) -> "Sums":
        """What each of several ranks has to hold for all of them to have these sums."""
        if num_ranks == 1 or self.kind in ("max", "min"):
            return self.chosen()
        whole = self
        if self.smallest > self.largest:  # of one device: what the ranks give from here on decides
            whole = replace(self.chosen(), constant_value=self.value, constant_weight=self.weight)
        return replace(whole, **{name: getattr(whole, name) / num_ranks for name in _ADDED})


def _times(value: Any, weight: Any) -> Tensor:
    return value * (weight.to(value.device, value.dtype) if isinstance(weight, Tensor) else weight)


def combine(parts: Sequence[Sums]) -> Sums:
    """Combine the sums of several ranks, of a step or of an epoch."""
    kind = parts[0].kind
    if kind == "own":
        return parts[0]
    added = {name: sum(getattr(part, name) for part in parts) for name in _ADDED}
    return Sums(
        kind, **{**added, "value": _OVER_PARTS[kind](part.value for part in parts)},
        smallest=min(part.smallest for part in parts), largest=max(part.largest for part in parts),
        own=all(part.own for part in parts),
    )  # fmt: skip


class Series:
    """The accumulator of one key.

    Args:
        meta: the arguments of `self.log`, in Lightning's form.
        value: the first value, a tensor or a torchmetrics metric, which keeps its state itself.

    Attributes:
        last: the last step's value: a copy, or a number that no tensor was made of yet.
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
        self.computed: Any = None
        self._dtype = torch.float32
        self.sums = Sums(self.kind, scalar(_START[self.kind], self.device, default_dtype()))

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
        if self.kind == "mean":
            if type(size) is not int or size > _EXACT:
                sums.value = sums.value + copy * size
            else:  # kept on the device, since a product with a number takes twice as long
                if size != self._size:
                    self._size, self._weight = size, scalar(size, self.device, torch.float32)
                sums.value = sums.value + copy * self._weight
            sums.weight = sums.weight + size
        else:
            sums.value = _WITH[self.kind](sums.value, copy)

    def count(
        self, copy: Tensor, size: Any, given: bool, share: Share | None, scale: Tensor | None, num_ranks: int
    ) -> None:
        """Accumulate a value that has waited for the end of the step; see `Sums.count`."""
        if not self.on_epoch:
            return
        if self.kind == "mean":
            self.sums.count(copy, size, given, share, scale, num_ranks)
        else:
            self._accumulate(copy, size)
        self.computed = None

    def step_value(self) -> Any:
        """The last step's value; None if there is none."""
        if type(self.last) is float:
            self.last = scalar(self.last, self.device, self._dtype)
        return self.last if self.on_step else None

    def of_epoch(self, reduce: Any = torch.clone) -> Tensor:
        """This rank's value of the epoch, or, with a function that reduces over ranks, that of all."""
        value, weight = reduce(self.sums.value), self.sums.weight
        if self.kind != "mean":
            return value
        return value / reduce(weight if isinstance(weight, Tensor) else torch.as_tensor(weight, device=self.device))

    def compute(self) -> Any:
        """The epoch's value, reduced over ranks by Lightning's own strategies; metrics gather their own states."""
        if self.computed is None:
            reduce: Any = self.meta.sync

            def reduce_copy(value: Tensor) -> Tensor:
                return reduce(value.clone())

            self.computed = self.of_epoch(reduce_copy) if self.is_tensor else self.value.compute()
        return self.computed

    def to(self, *args: Any, **kwargs: Any) -> "Series":
        """Move all data to a device."""
        if not self.is_tensor:
            self.value = self.value.to(*args, **kwargs)
        held = {name: getattr(self.sums, name) for name in _ADDED} | {"last": self.last, "computed": self.computed}
        for name, tensor in held.items():
            if isinstance(tensor, Tensor):
                setattr(self if name in ("last", "computed") else self.sums, name, tensor.to(*args, **kwargs))
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
    """Read an entry that a checkpoint has, in the form in which it was kept before there were `sums`."""
    if "sums" in entry:
        return dict(entry)
    state, given = entry["state"], entry["given"] or {}
    sums = Sums(entry["reduce_fx"], state["value"], state.get("cumulated_batch_size", 0))
    sums.own = given.get("own", True)
    if given:
        sums.constant_value, sums.constant_weight = given["value"], given["weight"]
        sums.more_value, sums.more_weight = given.get("more_value", 0.0), given.get("more_weight", 0.0)
    if given and given["num"] == entry["num_updates"]:
        sums.smallest, sums.largest = given["smallest"], given["largest"]
    elif given:
        sums.smallest, sums.largest = -inf, inf
    return {**entry, "sums": vars(sums), "last": state.get("_forward_cache")}


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
