"""What many files need of the insides of torch and Lightning."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks of a trainer, in the order in which they are called; Lightning does not declare the attribute."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def not_compiling() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled inside the block; called in a dispatch mode, they would remain so."""
    is_used = "torch._dynamo" in sys.modules  # which takes a second to import
    return torch.compiler.set_stance("force_eager") if is_used else nullcontext()
