"""`self.all_gather(z, sync_grads=True)` in a step: a contrastive loss over all rows trains as on one device."""

import warnings
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import Case, Net, Run, assert_equal, run
from torch import Tensor, nn

from evener.strategies import BalancedDDPStrategy, DDPStrategy, FSDPStrategy, SingleDeviceStrategy


class Contrastive(Net):
    """Own rows against the whole batch's: SimCLR's loss, of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def gathered(self, z: Tensor) -> Tensor:
        return self.all_gather(z, sync_grads=True).flatten(0, 1) if self.trainer.world_size > 1 else z

    def contrast(self, first: Tensor, second: Tensor) -> Tensor:
        own = torch.cat([first, second])
        every = torch.cat([self.gathered(first), self.gathered(second)])
        similar = torch.exp(own @ every.T * self.scale)
        positive = torch.exp((first * second).sum(1) * self.scale).repeat(2)
        negative = similar.sum(1) - torch.exp(self.scale)
        return -torch.log(positive / negative).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = nn.functional.normalize(self(batch[0]), dim=1)
        second = nn.functional.normalize(self(batch[0].flip(1)), dim=1)
        loss = self.contrast(first, second)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


class AllRows(Contrastive):
    """Each rank computes the loss of all rows, CLIP's, in evaluations, too."""

    def contrast(self, first: Tensor, second: Tensor) -> Tensor:
        logits = self.gathered(first) @ self.gathered(second).T * self.scale
        labels = torch.arange(len(logits))
        return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.contrast(self(batch[0]), self(batch[0].flip(1))), batch_size=len(batch[0]))


def _case(kind: type[Net]) -> Case:
    return Case(kind, num=9)  # batches of 4, 4 and 1: of 3 ranks two have none of the last


def _run(kind: type[Net], strategy: Any, num_ranks: int, options: dict[str, Any]) -> Run:
    warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
    return run(_case(kind), strategy(timeout_s=60, **options), devices=num_ranks)


@pytest.mark.parametrize("kind", [Contrastive, AllRows])
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "options"),
    [
        (DDPStrategy, 2, {"batch_size_is": "global"}),
        (DDPStrategy, 3, {"batch_size_is": "global"}),
        (BalancedDDPStrategy, 2, {"weights": [3, 1]}),
        (FSDPStrategy, 2, {"batch_size_is": "global"}),
    ],
)
def test_losses_over_gathered_rows_train_and_evaluate_as_on_one_device(
    kind: type[Net], strategy: Any, num_ranks: int, options: dict[str, Any]
) -> None:
    single = run(_case(kind), SingleDeviceStrategy(), devices=1)
    first, *others = run_ranks(_run, num_ranks, kind, strategy, num_ranks, options)
    assert_equal(first, single, 1e-10, of_a_rank=True)
    for found in others:
        torch.testing.assert_close(found.gradients, single.gradients, rtol=0, atol=1e-10)
