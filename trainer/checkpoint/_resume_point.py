"""Describe where a run goes on, for any number of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from ...strategies.registry import ranks_of
from ._other_ranks import state_for

Place: TypeAlias = Literal["between_batches", "before_validation", "after_epoch"]
BETWEEN_BATCHES: Place = "between_batches"
BEFORE_VALIDATION: Place = "before_validation"
AFTER_EPOCH: Place = "after_epoch"


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
    rows: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    is_global: bool = False
    ranks: Sequence[dict[str, Any]] | None = None

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "ResumePoint":
        """Read what `to_dict` returned; an empty mapping if a checkpoint has none."""
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__ if name in saved})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a checkpoint."""
        return dict(vars(self))

    @property
    def is_between_batches(self) -> bool:
        """Whether a batch of the same epoch comes next, perhaps after a validation."""
        return self.point in (BETWEEN_BATCHES, BEFORE_VALIDATION)

    @property
    def own(self) -> dict[str, Any] | None:
        """The state with which this rank goes on, after `for_rank`; None if there is none."""
        return self.ranks[0] if self.ranks else None

    def for_rank(self, trainer: pl.Trainer) -> "ResumePoint":
        """Return the same point with this rank's state alone.

        Raises:
            ConfigError: the states of a metric can't be carried over to another number of ranks.
        """
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
        rank = trainer.global_rank
        own = self.ranks[rank] if same else state_for(self.ranks, rank, trainer.world_size, trainer.lightning_module)
        return replace(self, ranks=[own])


def counts_global_batches(trainer: pl.Trainer) -> bool:
    """Whether the loader's batches are the global ones, so that a position means the same for any number of ranks."""
    ranks = ranks_of(trainer.strategy)
    return trainer.world_size == 1 or (ranks is not None and ranks.batch_size_is == "global")


def _ranks(num: int) -> str:
    return "one process" if num == 1 else f"{num} ranks"
