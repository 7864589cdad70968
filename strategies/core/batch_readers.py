"""Find the code, besides the steps themselves, that receives a batch and may use it on the root device."""

from typing import Any

import pytorch_lightning as pl

HOOKS = tuple(
    f"on_{stage}_batch_{when}" for stage in ("train", "validation", "test", "predict") for when in ("start", "end")
)
TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")
_OWN = ("evener.", "pytorch_lightning.", "lightning.pytorch.")
"""Packages whose hooks are known to read no more of a batch than its sizes."""


def batch_reader(trainer: pl.Trainer) -> str | None:
    """Find a hook of the user's that receives the whole batch, as a name for messages; None if there is none."""
    module: Any = trainer.lightning_module
    data: Any = getattr(trainer, "datamodule", None)
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]  # a list, untyped
    owners = [(module, HOOKS + TRANSFER_HOOKS), (data, TRANSFER_HOOKS), *((callback, HOOKS) for callback in callbacks)]
    for owner, names in owners:
        for name in names:
            hook = getattr(owner, name, None)
            if hook is not None and not f"{getattr(hook, '__module__', None)}.".startswith(_OWN):
                return f"{type(owner).__name__}.{name}"
    return None
