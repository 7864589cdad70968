"""Describe where a run goes on, for any number of ranks.

States of k ranks are carried over to k' ranks: first to one device's state, then to each new rank's part of it.

state                                       on one device                     on rank r of k'
position and order of the loaders           rank 0's, the same on all         the same on all
random streams of the process               rank 0's                          rank r's; new ones for ranks above k
gradients of an unfinished step             the mean over ranks               the same on all; DDP takes their mean
sum of loss weights of that step            the sum over ranks                all of it on rank 0
metrics of torchmetrics                     combined in the order of batches  all of it on rank 0
means and sums of `self.log`                the sum over ranks                an equal part on each
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from ...strategies.core.errors import ConfigError
from ...strategies.distributed.metrics.states import SavedMetric, resumed_states
from ...strategies.registry import ranks_of
from ..logging.series import on_other_ranks
from .file_io import CheckpointError

FORMAT = 1
"""What the entry of a checkpoint that resumes exactly looks like; files without a number are older than it."""

_OF_A_RANK = {"random", "loaders", "gradients", "weights", "metrics", "of_epoch", "results", "logged"}

State: TypeAlias = dict[str, Any]
Place: TypeAlias = Literal["between_batches", "before_validation", "after_epoch"]


@dataclass(frozen=True)
class ResumePoint:
    """The point between two batches, or after an epoch, at which a checkpoint was written.

    Args:
        point: where; None if a hook saved, which resumes by Lightning's rules.
        should_stop: whether the run was about to stop (`trainer.should_stop`).
        is_global: whether positions count global batches, which are the same for any number of ranks.
        ranks: the state of every rank, from `_run_state.capture`; of this rank only once `for_rank` has made it.
    """

    point: Place | None = None
    should_stop: bool = False
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    is_global: bool = False
    ranks: Sequence[dict[str, Any]] | None = None

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "ResumePoint":
        """Read what `to_dict` returned; an empty mapping if a checkpoint has none.

        Raises:
            CheckpointError: it has a later format, or the present one, but not all of it.
        """
        number = saved.get("format")
        if number is not None and number > FORMAT:
            raise CheckpointError(
                f"The checkpoint has format {number}, and this version of evener reads up to {FORMAT}. Resume with the "
                "version that wrote it, or a later one."
            )
        if number is not None:
            missing = sorted(cls.__dataclass_fields__.keys() - saved.keys())
            missing += sorted({key for rank in saved.get("ranks") or () for key in _OF_A_RANK - rank.keys()})
            if missing:
                raise CheckpointError(
                    f"The checkpoint lacks {', '.join(missing)} of what resuming needs (format {number}): somebody has "
                    "changed it. Resume from another one."
                )
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__ if name in saved})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a checkpoint."""
        return {"format": FORMAT, **vars(self)}

    @property
    def is_between_batches(self) -> bool:
        """Whether a batch of the same epoch comes next, perhaps after a validation."""
        return self.point in ("between_batches", "before_validation")

    @property
    def own(self) -> dict[str, Any] | None:
        """The state with which this rank goes on, after `for_rank`; None if there is none."""
        return self.ranks[0] if self.ranks else None

    def for_rank(self, trainer: pl.Trainer) -> "ResumePoint":
        """Return the same point with this rank's state alone."""
        if not self.ranks:
            return self
        same = len(self.ranks) == trainer.world_size
        if self.is_global != counts_global_batches(trainer) or not (self.is_global or same):
            rank_zero_warn(
                f"The checkpoint was written by {_ranks(len(self.ranks))} and is resumed by "
                f"{_ranks(trainer.world_size)}, where a loader's batch is not the global batch in both: the global "
                "batch changes, and the rest of this epoch may repeat or omit samples. To go on exactly, give the "
                "global batch as the loader's batch size, and set strategy.batch_size_is=global."
            )
        rank = min(trainer.global_rank, trainer.world_size - 1)  # in a global view each is the only one
        own = self.ranks[rank] if same else state_for(self.ranks, rank, trainer.world_size, trainer.lightning_module)
        return replace(self, ranks=[own])


def counts_global_batches(trainer: pl.Trainer) -> bool:
    """Whether the loader's batches are the global ones, so that a position means the same for any number of ranks."""
    ranks = ranks_of(trainer.strategy)
    return trainer.world_size == 1 or (ranks is not None and ranks.batch_size_is == "global")


def _ranks(num: int) -> str:
    return "one process" if num == 1 else f"{num} ranks"


def state_for(ranks: Sequence[State], rank: int, num_ranks: int, module: pl.LightningModule) -> State:
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
    whole = resumed_states(metric, used)
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
