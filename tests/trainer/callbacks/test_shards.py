"""Callbacks that read gradients see those of all ranks where each has a shard of them."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, weights
from tiny import Points
from torch import Tensor
from torch.utils.data import DataLoader

from evener.strategies import FSDPStrategy, SingleDeviceStrategy
from evener.trainer.callbacks import GradientNorm


class Overflowing(Net):
    """In the second step one gradient of the last layer alone is infinite: of few elements, on one rank."""

    def on_after_backward(self) -> None:
        gradient: Any = self.net[2].bias.grad
        if self.trainer.global_step == 1 and gradient is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.fill_(torch.inf)


def train(strategy: Any, num: int, norm_type: float) -> list[float]:
    tape = Points()
    pl.seed_everything(7, verbose=False)
    options: dict[str, Any] = {"logger": tape, "log_every_n_steps": 1, "callbacks": [GradientNorm(norm_type)]}
    quiet_trainer(strategy, num, **options).fit(Net(), DataLoader(Numbered(), 6))
    return [value for _, value in tape.of("gradient/norm")]


def skip(strategy: Any, num: int) -> Tensor:
    pl.seed_everything(7, verbose=False)
    module = Overflowing()
    quiet_trainer(strategy, num, detect_nonfinite="skip_step").fit(module, DataLoader(Numbered(), 6))
    return weights(module)


def strategy() -> FSDPStrategy:
    return FSDPStrategy(batch_size_is="global", timeout_s=60)


def on_ranks() -> Any:
    return train(strategy(), 2, 2.0), train(strategy(), 2, torch.inf), skip(strategy(), 2)


@pytest.mark.slow
def test_norms_and_nonfinite_gradients_are_those_of_all_shards() -> None:
    euclidean, largest = (train(SingleDeviceStrategy(), 1, norm_type) for norm_type in (2.0, torch.inf))
    skipped = skip(SingleDeviceStrategy(), 1)
    assert skipped.isfinite().all()
    ranks = run_ranks(on_ranks, 2, timeout_s=200)
    assert ranks[0][0] == pytest.approx(euclidean, abs=1e-10)
    assert ranks[0][1] == pytest.approx(largest, abs=1e-10)
    for _, _, found in ranks:
        torch.testing.assert_close(found, skipped, rtol=0, atol=1e-10)
