"""Describe logged values as plain data: what a checkpoint keeps, and what ranks tell each other at an epoch's end."""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import pytorch_lightning as pl
import torch
from torch import Tensor

from ...strategies.core.private import of_lightning, of_metrics, put
from ...strategies.core.private.of_lightning import Metadata, ResultMetric, Sync
from ...strategies.sharding.whole import map_tensors
from ._rank_log import GIVEN, GivenSizes

if TYPE_CHECKING:
    from .results import LeanResults

_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
_SUMS = ("value", "weight", "more_value", "more_weight")  # of `GivenSizes`
_STATE = ("value", "cumulated_batch_size", of_metrics.FORWARD_CACHE)

Entry: TypeAlias = dict[str, Any]
"""A logged value; `reduce_fx` is None for a metric object, which keeps its own state."""

REDUCTIONS: dict[str, Any] = {"mean": sum, "sum": sum, "max": max, "min": min}


def describe(metric: ResultMetric) -> Entry:
    """Read a logged value; its tensors stay where they are."""
    meta = metric.meta
    given: GivenSizes | None = vars(metric).get(GIVEN)
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce_fx": meta.reduce_fx.__name__ if metric.is_tensor else None,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "_op": meta.sync.op},
        "state": {name: getattr(metric, name) for name in _STATE if metric.is_tensor and hasattr(metric, name)},
        "given": None if given is None else given.tell(metric),
        "has_reset": metric.has_reset,
        "num_updates": of_metrics.update_count(metric),
    }


def made(entry: Entry, sync: Sync) -> ResultMetric:
    """Make a logged value of what `describe` returned, without its state."""
    reduction = {"reduce_fx": entry["reduce_fx"]} if entry["reduce_fx"] else {}
    meta = Metadata(**entry["meta"], **reduction)
    meta.sync = sync
    metric = ResultMetric(meta, is_tensor=bool(reduction))
    put(metric, update_count=entry["num_updates"])
    return metric


def capture(results: "LeanResults") -> dict[str, Entry]:
    """Read all values logged as tensors or numbers, by their keys, to the CPU."""
    results.settle()
    tensors = {key: describe(metric) for key, metric in results.items() if metric.is_tensor}
    return map_tensors(tensors, lambda tensor: tensor.detach().cpu())


def restore(trainer: pl.Trainer, results: "LeanResults", saved: dict[str, Entry]) -> None:
    """Fill a collection with the values that `capture` read, as if `self.log` had been called."""
    device = trainer.strategy.root_device
    if saved:  # Otherwise the first `self.log` of a loop resets its means.
        put(of_lightning.logger_connector(trainer), first_loop_iter=False)
    for key, entry in saved.items():
        metric = made(entry, Sync(fn=results.reduce, **entry["sync"]))  # as when such a value is logged
        for name, value in entry["state"].items():
            setattr(metric, name, value.to(device) if isinstance(value, Tensor) else value)
        if entry.get("given") is not None:
            told = {name: value for name, value in entry["given"].items() if name != "whole"}
            vars(metric)[GIVEN] = GivenSizes(**told)
        metric.has_reset = entry["has_reset"]
        results[key] = results.restored[key] = metric.to(device)


def on_one_device(ranks: Sequence[dict[str, Entry]]) -> dict[str, Entry]:
    """Combine what several ranks have captured to what one device would have."""
    keys = dict.fromkeys(key for results in ranks for key in results)
    return {key: _combined([results[key] for results in ranks if key in results]) for key in keys}


def part_of(whole: dict[str, Entry], num_ranks: int) -> dict[str, Entry]:
    """Return what each of several ranks has to hold for all of them to have accumulated what one device has."""
    return {key: _part(entry, num_ranks) for key, entry in whole.items()}


def _combined(entries: Sequence[Entry]) -> Entry:
    counted = [entry for entry in entries if not entry["has_reset"]]
    first = entries[0]
    if not counted or not first["meta"]["on_epoch"] or first["sync"]["rank_zero_only"]:
        return first
    values = [entry["state"]["value"] for entry in counted]
    counts = [entry["state"]["cumulated_batch_size"] for entry in counted if "cumulated_batch_size" in entry["state"]]
    state = {**first["state"], "value": REDUCTIONS[first["reduce_fx"]](values)}
    num_updates = max(entry["num_updates"] for entry in counted)
    given = [entry["given"] for entry in counted if entry["given"] is not None]
    whole = len(given) == len(counted) and all(entry["given"]["num"] == entry["num_updates"] for entry in counted)
    merged = None
    if given:
        merged = {
            **{name: sum(one.get(name, 0.0) for one in given) for name in _SUMS},
            "smallest": min(one["smallest"] for one in given),
            "largest": max(one["largest"] for one in given),
            "own": all(one["own"] for one in given),
            "num": num_updates if whole else -1,
        }
    if counts:
        state["cumulated_batch_size"] = sum(counts)
    return {**first, "state": state, "given": merged, "num_updates": num_updates, "has_reset": False}


def _part(entry: Entry, num_ranks: int) -> Entry:
    state, given = dict(entry["state"]), entry["given"]
    if entry["has_reset"] or not entry["meta"]["on_epoch"] or entry["sync"]["rank_zero_only"]:
        return entry
    if given is not None and num_ranks == 1:  # one device counts by what was given, if that was for the whole batch
        if given["num"] == entry["num_updates"] and given["smallest"] == given["largest"] and not given["own"]:
            like: Any = state["value"]
            state["value"] = torch.as_tensor(given["value"], dtype=like.dtype)
            state["cumulated_batch_size"] = torch.as_tensor(given["weight"])
        elif given["own"] and entry["reduce_fx"] == "mean":
            state["value"] = state["value"] + given.get("more_value", 0.0)
            state["cumulated_batch_size"] = state["cumulated_batch_size"] + given.get("more_weight", 0.0)
        return {**entry, "state": state, "given": None}
    if entry["reduce_fx"] == "mean" and given is None:
        # whether `batch_size` was given is not known of one device: what the ranks give from here on decides
        weight = state["cumulated_batch_size"]
        given = {"value": state["value"], "weight": weight, "smallest": inf, "largest": -inf, "own": True}
        given["num"] = entry["num_updates"]
    if entry["reduce_fx"] in ("mean", "sum"):
        state |= {name: state[name] / num_ranks for name in ("value", "cumulated_batch_size") if name in state}
    if given is not None:
        given = {**given, **{name: given.get(name, 0.0) / num_ranks for name in _SUMS}}
    return {**entry, "state": state, "given": given}
