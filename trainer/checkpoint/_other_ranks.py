"""Carry the states of k ranks over to k' ranks: first to one device's state, then to each new rank's part of it.

state                                       on one device                     on rank r of k'
position and order of the loaders           rank 0's, the same on all         the same on all
random streams of the process               rank 0's                          rank r's; new ones for ranks above k
gradients of an unfinished step             the mean over ranks               the same on all; DDP takes their mean
sum of loss weights of that step            the sum over ranks                all of it on rank 0
metrics of torchmetrics                     combined in the order of batches  all of it on rank 0
means and sums of `self.log`                the sum over ranks                an equal part on each
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric

from ...strategies.core.errors import ConfigError
from ...strategies.distributed.metrics.states import SavedMetric, combined_states
from ..logging.series import on_other_ranks

State = dict[str, Any]


def state_for(ranks: Sequence[State], rank: int, num_ranks: int, module: LightningModule) -> State:
    """Return the state with which a rank goes on, or refuse a metric whose states can't be combined."""
    first = rank == 0
    metrics = {
        name: _metric_part(name, metric, [SavedMetric.read(state["metrics"][name]) for state in ranks], first)
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and all(name in state["metrics"] for state in ranks)
    }
    return {
        **ranks[0],
        "random": ranks[rank]["random"] if rank < len(ranks) else None,
        "gradients": _mean([state["gradients"] for state in ranks]),
        "weights": sum(state["weights"] for state in ranks) if first else 0.0,
        "metrics": metrics,
        "results": on_other_ranks([state["results"] for state in ranks], num_ranks),
    }


def _mean(ranks: Sequence[dict[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """Average gradients as DDP does; a rank without one for a parameter has zero."""
    if ranks[0] is None:
        return None
    found = [gradients or {} for gradients in ranks]
    names = dict.fromkeys(name for gradients in found for name in gradients)
    return {name: sum(own[name] for own in found if name in own) / len(ranks) for name in names}  # pyright: ignore[reportReturnType]  # a Tensor, as there is one


def _metric_part(name: str, metric: Metric, saved: Sequence[SavedMetric], first: bool) -> dict[str, Any]:
    used = [one for one in saved if one.num_updates]
    if not used:
        return saved[0].to_dict()
    count = max(one.num_updates for one in used)
    whole = combined_states(metric, used)
    if whole is None:
        raise ConfigError(
            f"The checkpoint was written within an epoch with {len(saved)} processes, and what "
            f"{type(metric).__name__} ({name}) has collected since can't be carried over to another number. Resume "
            f"with {len(saved)}, or from the end of an epoch."
        )
    if first:
        return SavedMetric(whole, count).to_dict()
    with torch.inference_mode(False), torch.no_grad():
        empty = copy.deepcopy(metric).cpu()
        empty.reset()
    states = {key: getattr(empty, key) for key in whole}
    # a metric without updates warns when it is computed; one whose states have no shape yet must not be stacked
    is_shaped = all(_shape(states[key]) == _shape(whole[key]) for key in whole if isinstance(whole[key], Tensor))
    return SavedMetric(states, count if is_shaped else 0).to_dict()


def _shape(state: Any) -> Any:
    return state.shape if isinstance(state, Tensor) else None
