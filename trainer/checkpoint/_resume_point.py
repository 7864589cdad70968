"""Describe where a run goes on, for any number of ranks, and where it has ended."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from ...strategies.core.internals import callbacks_of
from ...strategies.registry import ranks_of
from ._host_memory import HostMemory
from ._other_ranks import state_for
from .file_io import CheckpointError

FORMAT = 1
"""What the entry of a checkpoint that resumes exactly looks like; files without a number are older than it."""

_OF_A_RANK = {"random", "loaders", "gradients", "weights", "metrics", "of_epoch", "results", "logged"}

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
        rank = trainer.global_rank
        own = self.ranks[rank] if same else state_for(self.ranks, rank, trainer.world_size, trainer.lightning_module)
        return replace(self, ranks=[own])


@dataclass(frozen=True)
class EndOfRun:
    """Where training has ended, for what `trainer.save_checkpoint`, or a hook of the end of the epoch, saves then.

    If steps or time are used up within an epoch, Lightning ends the epoch all the same: hooks run, metrics are reset,
    and the next epoch is counted. A run that goes on with more steps must not see that.

    Args:
        point: with this rank's state.
        entries: replace a checkpoint's.
        callbacks: states of callbacks; those that save are left out, since they must know the files written since.
        ranks: the states of all ranks, for the script that has started them and saves when they have ended; None if
            the ranks themselves are still there to gather them.
    """

    point: ResumePoint
    entries: Mapping[str, Any] = field(default_factory=dict[str, Any])
    callbacks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ranks: Sequence[dict[str, Any]] | None = None

    @classmethod
    def of(cls, trainer: pl.Trainer, point: ResumePoint) -> "EndOfRun":
        """Copy the present state, between two batches or after an epoch."""
        copied = replace(point, ranks=HostMemory().take(point.ranks))
        if point.point == "after_epoch":
            return cls(copied)
        loops = trainer._checkpoint_connector._get_loops_state_dict()
        entries = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "loops": loops}
        found = (cb for cb in callbacks_of(trainer) if not isinstance(cb, LightningCheckpoint))
        callbacks = {cb.state_key: cb.state_dict() for cb in found}
        return cls(copied, copy.deepcopy(entries), HostMemory().take(callbacks))

    def put_into(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint, which was read since, with this state in the place of its own."""
        callbacks = {key: self.callbacks.get(key, state) for key, state in checkpoint.get("callbacks", {}).items()}
        return {**checkpoint, **self.entries, "callbacks": callbacks}


def counts_global_batches(trainer: pl.Trainer) -> bool:
    """Whether the loader's batches are the global ones, so that a position means the same for any number of ranks."""
    ranks = ranks_of(trainer.strategy)
    return trainer.world_size == 1 or (ranks is not None and ranks.batch_size_is == "global")


def _ranks(num: int) -> str:
    return "one process" if num == 1 else f"{num} ranks"
