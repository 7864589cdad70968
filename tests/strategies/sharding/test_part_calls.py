"""Ranks that call other parts of the module are refused by name; gloo ended one of them by SIGABRT, or all waited."""

from typing import Any

import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Numbered, quiet_trainer
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, FSDPStrategy

SHARD = ["first", "again"]


class Repeats(pl.LightningModule):
    """Calls a layer as often as it is told to, by rank and step."""

    def __init__(self, times: dict[tuple[int, int], int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.last = (nn.Linear(n, 3, dtype=torch.float64) for n in (3, 3, 3))
        self.times = times

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = self.first(batch[0])
        for _ in range(self.times.get((self.global_rank, batch_idx), 1)):
            value = self.again(value)
        return self.last(value).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _ended(times: dict[tuple[int, int], int], shard: list[str]) -> tuple[str, int]:
    trainer = quiet_trainer(FSDPStrategy(shard, batch_size_is="global", timeout_s=60), 2, max_epochs=1)
    module = Repeats(times)
    try:
        trainer.fit(module, DataLoader(Numbered(48), 4))
    except ConfigError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


def _all_ended() -> list[tuple[str, int]]:
    twice_on_rank_1 = {(1, step): 2 for step in range(12)}
    return [
        _ended(twice_on_rank_1, SHARD), _ended({(0, 2): 0}, SHARD), _ended(twice_on_rank_1, []), _ended({}, SHARD),
    ]  # fmt: skip


def test_ranks_that_call_other_parts_are_refused_with_what_each_calls() -> None:
    # Cause: each call gathers the part from all ranks; one rank gathered another part, or none any more.
    for first, later, gathered_once, alike in run_ranks(_all_ended, 2, timeout_s=120):
        assert "(next: rank 0 the end of the step, rank 1 again)" in first[0]
        assert "(next: rank 0 the end of the step, rank 1 again)" in later[0]
        assert (first[1], later[1]) == (0, 2)
        assert gathered_once == alike == ("", 12)


class RepeatsInEvaluation(Repeats):
    """Calls the layers so in evaluation only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.last(self.again(self.first(batch[0]))).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    predict_step = validation_step


def _evaluated(call: str, *args: Any) -> str:
    trainer = quiet_trainer(FSDPStrategy(SHARD, batch_size_is="global", timeout_s=60), 2, max_epochs=2)
    try:  # in the second batch, of the ninth and later steps of training
        getattr(trainer, call)(RepeatsInEvaluation({(1, 1): 2}), *args)
    except ConfigError as error:
        return str(error)
    return ""


def _all_evaluated() -> list[str]:
    loader, long = DataLoader(Numbered(8), 4), DataLoader(Numbered(48), 4)
    return [_evaluated("fit", long, loader), _evaluated("validate", loader), _evaluated("predict", loader)]


def test_evaluating_ranks_that_call_other_parts_are_refused_too() -> None:
    # Cause: only steps of training were watched; gloo ended a rank by SIGABRT in Lightning's sanity check.
    for fit, validate, predict in run_ranks(_all_evaluated, 2, timeout_s=120):
        assert "other parts of the module in validation_step" in fit
        assert "(next: rank 0 the end of the step, rank 1 again)" in validate
        assert "other parts of the module in predict_step" in predict


class Adapts(Repeats):
    """A step of MAML: the loss of weights after a step of gradient descent."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = dict(self.first.named_parameters())
        loss = functional_call(self.first, weights, batch[0]).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return self.last(self.again(functional_call(self.first, adapted, batch[0]))).square().mean()


def _adapted(shard: list[str]) -> str:
    trainer = quiet_trainer(FSDPStrategy(shard, batch_size_is="global", timeout_s=60), 2, max_epochs=1)
    try:
        trainer.fit(Adapts({}), DataLoader(Numbered(8), 4))
    except RuntimeError as error:
        return str(error)
    return ""


def _both_adapted() -> list[str]:
    return [_adapted(SHARD), _adapted([])]


def test_gradients_by_parameters_of_a_part_are_told_to_gather_all() -> None:
    for cut, gathered in run_ranks(_both_adapted, 2, timeout_s=120):
        assert "set strategy.shard=[]" in cut
        assert not gathered
