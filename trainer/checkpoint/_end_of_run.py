"""Keep where training ended for what is saved afterwards: by `trainer.save_checkpoint`, or by hooks of the epoch's end.

If steps or time are used up within an epoch, Lightning ends the epoch all the same: hooks run, metrics are reset, and
the next epoch is counted. A run that goes on with more steps must not see that.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint

from ...strategies.core.private import of_lightning
from ._snapshot import Snapshot


@dataclass(frozen=True)
class EndOfRun:
    """What the end of a run changes although it is no part of training.

    Args:
        point: where training ended, a `ResumePoint` with this rank's state.
        entries: replace a checkpoint's.
        callbacks: states of callbacks; those that save are left out, since they must know the files written since.
    """

    point: Mapping[str, Any]
    entries: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: pl.Trainer, point: Mapping[str, Any], within_epoch: bool) -> "EndOfRun":
        """Copy the present state.

        Args:
            trainer: the trainer, between two batches or after an epoch.
            point: where it is.
            within_epoch: whether an end of the epoch follows that is not to be part of a checkpoint.
        """
        copied = Snapshot().take
        if not within_epoch:
            return cls(copied(point))
        loops = of_lightning.get_loops_state_dict(of_lightning.connector(trainer))()
        entries = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "loops": loops}
        found: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]  # a list, untyped
        callbacks = {cb.state_key: cb.state_dict() for cb in found if not isinstance(cb, LightningCheckpoint)}
        return cls(copied(point), copy.deepcopy(entries), Snapshot().take(callbacks))

    def put_into(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint, which was read since, with this state in the place of its own."""
        callbacks = {key: self.callbacks.get(key, state) for key, state in checkpoint.get("callbacks", {}).items()}
        return {**checkpoint, **self.entries, "callbacks": callbacks}
