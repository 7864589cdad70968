"""Save and restore the values that `self.log` has accumulated in an unfinished epoch, and withdraw outdated points."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.compat.proto import event_pb2 as event_pb2_module
from torch import Tensor

from ...strategies.core.private import of_lightning, of_metrics, of_torch, put
from ...strategies.core.private.of_lightning import Metadata, ResultCollection, ResultMetric, Sync

# protobuf creates its classes at run time
event_pb2: Any = event_pb2_module

_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch"),
    *("enable_graph", "add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_STATE = ("value", "cumulated_batch_size", of_metrics.FORWARD_CACHE)

Entry: TypeAlias = dict[str, Any]
"""A logged value that `capture` read."""

_REDUCTIONS: dict[str, Any] = {"mean": sum, "sum": sum, "max": max, "min": min}


def capture(results: ResultCollection) -> dict[str, Any]:
    """Read the values logged as tensors or numbers; metric objects keep their own state.

    Args:
        results: the training loop's.

    Returns:
        Plain data by the collection's keys.
    """
    settle = getattr(results, "settle", None)
    if settle is not None:  # A collection with slots writes the values that they hold.
        settle()
    given_of = getattr(results, "given_of", None)
    tensors = [(key, metric) for key, metric in results.items() if metric.is_tensor]
    return {key: _capture(metric, None if given_of is None else given_of(metric)) for key, metric in tensors}


def restore(trainer: pl.Trainer, results: ResultCollection, saved: dict[str, Any]) -> None:
    """Fill a collection with the values that `capture` read, as if `self.log` had been called."""
    device = trainer.strategy.root_device
    if saved:  # Otherwise the first `self.log` of a loop resets its means.
        put(of_lightning.logger_connector(trainer), first_loop_iter=False)
    for key, entry in saved.items():
        meta = Metadata(**entry["meta"], reduce_fx=entry["reduce_fx"])
        reduce = trainer.strategy.reduce
        through: Any = getattr(results, "through", None)
        if through is not None and entry["sync"]["_should"]:
            reduce = through(reduce)  # as the collection does when such a value is logged
        meta.sync = Sync(fn=reduce, **entry["sync"])
        metric = ResultMetric(meta, is_tensor=True)
        for name, value in entry["state"].items():
            setattr(metric, name, value.to(device) if isinstance(value, Tensor) else value)
        if entry.get("given") is not None:
            getattr(results, "set_given")(metric, entry["given"])  # noqa: B009  # a collection that could save it has it
        metric.has_reset = entry["has_reset"]
        put(metric, update_count=entry["num_updates"])
        results[key] = metric.to(device)
        restored: dict[str, Any] = getattr(results, "restored", {})
        restored[key] = results[key]


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
    state = {**first["state"], "value": _REDUCTIONS[first["reduce_fx"]](values)}
    num_updates = max(entry["num_updates"] for entry in counted)
    given = [entry["given"] for entry in counted if entry["given"] is not None]
    whole = len(given) == len(counted) and all(entry["given"]["num"] == entry["num_updates"] for entry in counted)
    merged = None
    if given:
        merged = {
            "value": sum(one["value"] for one in given),
            "weight": sum(one["weight"] for one in given),
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
        return {**entry, "state": state, "given": None}
    if entry["reduce_fx"] == "mean" and given is None:
        # whether `batch_size` was given is not known of one device: what the ranks give from here on decides
        weight = state["cumulated_batch_size"]
        given = {"value": state["value"], "weight": weight, "smallest": inf, "largest": -inf, "own": True}
        given["num"] = entry["num_updates"]
    if entry["reduce_fx"] in ("mean", "sum"):
        state["value"] = state["value"] / num_ranks
    if "cumulated_batch_size" in state:
        state["cumulated_batch_size"] = state["cumulated_batch_size"] / num_ranks
    if given is not None:
        given = {**given, "value": given["value"] / num_ranks, "weight": given["weight"] / num_ranks}
    return {**entry, "state": state, "given": given}


def withdraw_later_points(trainer: pl.Trainer) -> None:
    """Tell TensorBoard to discard later points, which were written before this run was interrupted."""
    step = of_lightning.log_step(trainer)
    logs = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    logs += [log for logger in logs for log in getattr(logger, "sub_runs", ())]
    for log in logs if trainer.is_global_zero else []:
        writer: Any = log.experiment
        several = len(list(Path(log.log_dir).glob("events.out.tfevents.*"))) > 1
        if several or getattr(writer, "continues", False):
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            of_torch.get_file_writer(writer)().add_event(event_pb2.Event(session_log=started), step)


def _capture(metric: ResultMetric, given: dict[str, Any] | None) -> dict[str, Any]:
    meta = metric.meta
    state = {name: on_cpu(getattr(metric, name)) for name in _STATE if hasattr(metric, name)}
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "_op": meta.sync.op},
        "state": state,
        "given": None if given is None else {name: on_cpu(value) for name, value in given.items()},
        "has_reset": metric.has_reset,
        "num_updates": of_metrics.update_count(metric),
    }


def on_cpu(value: Any) -> Any:
    """A tensor on the CPU, without its graph; anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
