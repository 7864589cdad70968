"""A moving average of the weights that a hook writes through `.data` between two optimizer steps.

Cause: weights without gradients were copied after optimizer steps only, and accumulation has batches in between.
"""

import copy
from typing import Any

from parity import Case, Net, assert_equal, baseline, run
from torch import Tensor

from evener.strategies import DataParallelStrategy


class TeacherNet(Net):
    """Stays near an average of its weights, which moves after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        for slow in self.teacher.parameters():
            slow.data.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.read(batch)[0]
        return super().training_step(batch, batch_idx) + (self(x) - self.teacher(x)).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        for own, slow in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            slow.data.mul_(0.9).add_(own.data, alpha=0.1)


def test_an_average_that_moves_between_optimizer_steps_equals_one_device() -> None:
    case = Case(TeacherNet, trainer={"accumulate_grad_batches": 3})
    assert_equal(run(case, DataParallelStrategy(), devices=2), baseline(case), 1e-10)
