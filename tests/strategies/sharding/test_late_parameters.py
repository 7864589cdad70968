"""Layers that a module is given during training can't be cut over the ranks any more, and are refused by name."""

from typing import Any

import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, refusal
from torch import nn
from torch.utils.data import DataLoader

from evener.strategies import FSDPStrategy


class Changes(pl.Callback):
    """Adds or replaces a layer after the second of three steps, or after the last one."""

    def __init__(self, name: str, at: int) -> None:
        self.name, self.at = name, at

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            owner = pl_module if self.name == "added" else pl_module.net
            setattr(owner, self.name, nn.Linear(3 if self.name == "0" else 1, 4, dtype=torch.float64))


def _ended(name: str, at: int) -> tuple[str, int]:
    trainer = quiet_trainer(FSDPStrategy(timeout_s=60), 2, max_epochs=1, callbacks=[Changes(name, at)])
    return refusal(trainer, Net(), DataLoader(Numbered(12), 2)), trainer.global_step


def _all_ended() -> list[tuple[str, int]]:
    return [_ended("added", 2), _ended("0", 2), _ended("added", 3)]


def test_a_layer_that_comes_during_training_is_refused_in_the_next_step() -> None:
    # one that was added ended with a KeyError after training; one that was replaced was said to be unused
    for added, replaced, last in run_ranks(_all_ended, 2):
        assert "fsdp: added.weight, added.bias was added, or replaced" in added[0]
        assert "fsdp: net.0.weight, net.0.bias was added, or replaced" in replaced[0]
        assert (added[1], replaced[1]) == (2, 2)
        assert last == ("", 3)
