"""Combine an epoch's logged values over all ranks: exact weighted means, with one collective for all keys.

Lightning reduces key by key, rounds the number of samples, and hangs if ranks logged different keys.
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from ...strategies.core.private import of_metrics
from ...strategies.core.private.of_lightning import ResultCollection, ResultMetric, Sync
from ...strategies.distributed.objects import gather_objects
from ...strategies.distributed.store import RankError
from ...strategies.registry import ranks_of
from ...strategies.sharding.whole import map_tensors
from ._eval_step_sync import Step
from ._hook_values import verify_hook_values
from ._rank_log import are_constants
from .entries import REDUCTIONS, Entry, describe, made


def is_shared_by(trainer: pl.Trainer) -> bool:
    """Whether this module exchanges an epoch's values; with Lightning's own strategies, Lightning does."""
    return trainer.world_size > 1 and ranks_of(trainer.strategy) is not None


@contextmanager
def own_values(results: ResultCollection) -> Generator[None]:
    """Inside the block, reading values of the epoch that were not exchanged yet returns this rank's own.

    Lightning would reduce them on reading, and hang if only some ranks read. Metrics of torchmetrics, which all ranks
    must compute together, are hidden until then.
    """
    waiting = [metric for metric in results.values() if not metric.has_reset and _awaits_exchange(metric)]
    for metric in waiting:
        if metric.is_tensor:
            vars(metric)[of_metrics.COMPUTED] = _own_value(metric)
        else:
            metric.has_reset = True
    try:
        yield
    finally:
        for metric in waiting:
            vars(metric)[of_metrics.COMPUTED] = None
            metric.has_reset = False


def _awaits_exchange(metric: ResultMetric) -> bool:
    return metric.meta.on_epoch and of_metrics.computed(metric) is None


def _own_value(metric: ResultMetric) -> Any:
    value: Any = metric.value
    return value / metric.cumulated_batch_size if metric.meta.is_mean_reduction else value.clone()


def share(trainer: pl.Trainer, results: ResultCollection, steps: list[Step]) -> list[list[Step]]:
    """Compute the epoch's values over all ranks; every rank must call it at the end of an epoch.

    Means are weighted by samples. A rank without batches takes part with zero weight and receives the values too, since
    callbacks act on them.

    Args:
        trainer: nothing is done unless its strategy has ranks that share batches.
        steps: the values that it logged by step and that have not been exchanged.

    Raises:
        RankError: ranks logged different keys with `sync_dist=True`; the message names rank and key.
        ConfigError: the sanity check shows that ranks disagree on a value of an epoch's hook; the message names it.
    """
    ranks = ranks_of(trainer.strategy)
    if ranks is None or ranks.world_size == 1:
        return [steps]
    own = {key: metric for key, metric in results.items() if _is_shared(metric, results)}
    described = {key: describe(metric) for key, metric in own.items()}
    gathered = gather_objects((map_tensors(described, Tensor.item), steps))
    told: list[dict[str, Entry]] = [keys for keys, _ in gathered]
    _verify_keys(told)
    verify_hook_values(trainer, told)
    for key in dict.fromkeys(key for entries in told for key in entries):
        entries = [entries[key] for entries in told if key in entries]
        metric = own.get(key) or _stand_in(trainer, results, key, entries[0])
        if metric.is_tensor:
            like: Any = metric.value
            vars(metric)[of_metrics.COMPUTED] = torch.tensor(_combine(entries), dtype=like.dtype, device=like.device)
        else:
            _compute(metric)
    return [others for _, others in gathered]


def _is_shared(metric: ResultMetric, results: ResultCollection) -> bool:
    meta = metric.meta
    current = not metric.has_reset and meta.dataloader_idx == results.dataloader_idx
    return current and not meta.sync.rank_zero_only and _awaits_exchange(metric)


def _verify_keys(told: list[dict[str, Entry]]) -> None:
    asked = {
        key: (rank, entry["meta"])
        for rank, part in enumerate(told)
        for key, entry in part.items()
        if entry["sync"]["_should"]
    }
    for rank, entries in enumerate(told):
        hooks = {entry["meta"]["fx"] for entry in entries.values()}
        for key, (other, meta) in asked.items():
            if key not in entries and meta["fx"] in hooks:
                names = ", ".join(sorted(entry["meta"]["name"] for entry in entries.values()))
                raise RankError(
                    f"rank {other} logged {meta['name']!r} with sync_dist=True in {meta['fx']}, but rank {rank} did "
                    f"not (it logged {names}). Log the same keys on all ranks, or omit sync_dist."
                )


def _combine(entries: list[Entry]) -> float:
    kind, states = entries[0]["reduce_fx"], [entry["state"] for entry in entries]
    value = REDUCTIONS[kind](state["value"] for state in states)
    if kind != "mean":
        return value
    counted = [entry["given"] for entry in entries if entry["state"]["cumulated_batch_size"]]
    if are_constants(entries[0]["meta"]["name"], counted):
        return sum(given["value"] for given in counted) / sum(given["weight"] for given in counted)
    count = sum(state["cumulated_batch_size"] for state in states)
    known = [entry["given"] for entry in entries if entry["given"] is not None]
    if all(given["own"] for given in known):
        value += sum(given["more_value"] for given in known)
        count += sum(given["more_weight"] for given in known)
    return value / count if count else float("nan")


def _stand_in(trainer: pl.Trainer, results: ResultCollection, key: str, entry: Entry) -> ResultMetric:
    """Create the entry of a key that only other ranks logged."""
    metric = results[key] = made(entry, Sync()).to(trainer.strategy.root_device)
    if not metric.is_tensor:
        attribute = trainer.lightning_module.get_submodule(entry["meta"]["metric_attribute"])
        assert isinstance(attribute, Metric)
        metric.value = attribute  # pyright: ignore[reportAttributeAccessIssue]  # as Lightning's own update does
    return metric


def _compute(metric: ResultMetric) -> None:
    """Compute a torchmetrics metric, which gathers its own states; all ranks must call it in the same order."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before", UserWarning)
        metric.compute()
