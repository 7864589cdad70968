"""Numbers that steps append to a list of the module, as Lightning 2 advises for the end of an epoch.

Cause: every chunk appended its own mean, and `torch.stack(self.outputs).mean()` weighed chunks of 3 and 1 alike.
"""

from typing import Any

import pytest
import torch
from parity import Case, Net, assert_equal, baseline, run
from torch import Tensor

from evener.strategies import BalancedDataParallelStrategy, DataParallelStrategy
from evener.strategies.core.errors import ConfigError


class CollectingNet(Net):
    """Logs the mean of its batches' losses."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.counts: list[int] = []
        self.rows: list[Tensor] = []

    def on_validation_epoch_start(self) -> None:
        self.outputs.clear()
        self.counts.clear()
        self.rows.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        self.outputs.append(loss)
        self.counts.append(len(batch[0]))
        self.rows.append(batch[0][:, 0])
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack(self.outputs).mean())
        self.log("val_count", float(sum(self.counts)))
        self.log("val_rows", torch.cat(self.rows).mean())


DIMS = {"validation_step.outputs": "mean"}


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: DataParallelStrategy(batch_dims=DIMS),
        lambda: DataParallelStrategy(batch_dims=DIMS, threads=False),
        lambda: BalancedDataParallelStrategy(weights=[3, 1, 2], batch_dims=DIMS),
    ],
)
def test_collected_means_are_those_of_batches(strategy: Any) -> None:
    case = Case(CollectingNet)
    assert_equal(run(case, strategy(), devices=3), baseline(case), 1e-10)


class TrainingNet(Net):
    """Makes an empty list in every epoch, to which the steps append losses of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_epoch_start(self) -> None:
        self.seen = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("seen", torch.cat(self.seen).mean())


def test_a_new_list_replaces_an_equal_one_on_all_replicas() -> None:
    # cause: attributes were compared by ==, so that copies kept the first empty list and their rows were lost
    case = Case(TrainingNet, trainer={"max_epochs": 1})
    assert_equal(run(case, DataParallelStrategy(), devices=3), baseline(case), 1e-10)


def test_collected_numbers_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"validation_step appended 2 values to CollectingNet\.outputs.*batch_dims"):
        run(Case(CollectingNet, trainer={"num_sanity_val_steps": 2}), DataParallelStrategy(), devices=2)
