"""Find values that an epoch's hooks computed from what each rank collected itself.

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.outputs).mean())  # of this rank's samples

No one but the module knows what such a value is a mean of, so ranks that disagree on it can't be combined exactly.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from ...strategies.core.errors import ConfigError

_TOLD = "hook_values_told"
"""Attribute of the trainer that holds the keys it has warned about."""


def verify_hook_values(trainer: pl.Trainer, told: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Refuse, or warn once training has begun, if ranks disagree on a value of an epoch's hook; all ranks call it.

    Args:
        trainer: before the first optimizer step if it is in its sanity check.
        told: what each rank logged, by key.

    Raises:
        ConfigError: the message names the key.
    """
    for key in dict.fromkeys(key for entries in told for key in entries):
        entries = [entries[key] for entries in told if key in entries]
        if not _is_hooks_mean(entries[0]) or _agree(entries):
            continue
        meta = entries[0]["meta"]
        values = " and ".join(f"{entry['state']['value']:.6g}" for entry in entries[:3])
        message = (
            f"self.log({meta['name']!r}) in {meta['fx']}: the value is another one on each rank ({values}), so the "
            "mean over ranks is not one device's. Log it in the step, or pass sync_dist=True and batch_size=<number of "
            "this rank's samples that it is a mean of>, or rank_zero_only=True for rank 0's own value."
        )
        if trainer.sanity_checking:
            raise ConfigError(message)
        known: set[str] = vars(trainer).setdefault(_TOLD, set())
        if key not in known:
            known.add(key)
            rank_zero_warn(message)


def _is_hooks_mean(entry: Mapping[str, Any]) -> bool:
    """Whether a value was logged once, as a mean, without `sync_dist` or `batch_size`, outside of any batch."""
    hook: str = entry["meta"]["fx"]
    outside = hook.endswith(("_start", "_end")) and "batch" not in hook
    once = entry["reduce_fx"] == "mean" and entry["state"]["cumulated_batch_size"] == 1
    return outside and once and not entry["sync"]["_should"]


def _agree(entries: Sequence[Mapping[str, Any]]) -> bool:
    first, *others = (entry["state"]["value"] for entry in entries)
    return all(
        math.isclose(value, first, rel_tol=1e-6, abs_tol=1e-12) or (math.isnan(value) and math.isnan(first))
        for value in others
    )
