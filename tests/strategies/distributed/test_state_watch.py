"""State that a training step carries to the next is named where each rank has its own."""

import warnings
from typing import Any

import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy


class Averaging(Net):
    """Subtracts a moving average of its output, which it keeps in an attribute, a buffer or not at all."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps = keeps
        self.register_buffer("in_buffer", torch.zeros(1, dtype=torch.float64))
        self.in_attribute = torch.zeros(1, dtype=torch.float64)
        self.count = torch.zeros(1, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count = self.count + 1  # the same on all ranks
        if self.keeps:
            setattr(self, self.keeps, 0.8 * getattr(self, self.keeps) + 0.2 * self.net(batch[0]).mean().detach())
        return super().training_step(batch, batch_idx)


def _warned(keeps: str, num: int) -> list[str]:
    trainer = quiet_trainer(DDPStrategy(batch_size_is="global", timeout_s=120), 2, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Averaging(keeps), DataLoader(Numbered(num), 4))
    return [str(warning.message) for warning in caught if "training_step changes" in str(warning.message)]


def _all_warned() -> list[list[str]]:
    return [_warned("in_attribute", 8), _warned("in_buffer", 8), _warned("", 8)]


def test_state_that_each_rank_computes_from_its_own_samples_is_named() -> None:
    # rl4co's moving average of the reward, which its loss subtracts, was each rank's own without a word.
    in_attribute, in_buffer, none = run_ranks(_all_warned, 2)[0]
    assert [message.partition(" on each rank")[0] for message in (*in_attribute, *in_buffer)] == [
        "ddp: training_step changes in_attribute", "ddp: training_step changes in_buffer"
    ]  # fmt: skip
    assert none == []
