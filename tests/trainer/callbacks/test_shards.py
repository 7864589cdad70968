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


def observed(num: int) -> tuple[list[float], list[float], Tensor]:
    """Norms of two kinds, and the weights after a step that is skipped."""

    def strategy() -> Any:
        return FSDPStrategy(batch_size_is="global", timeout_s=60) if num > 1 else SingleDeviceStrategy()

    norms = [train(strategy(), num, norm_type) for norm_type in (2.0, torch.inf)]
    pl.seed_everything(7, verbose=False)
    module = Overflowing()
    quiet_trainer(strategy(), num, detect_nonfinite="skip_step").fit(module, DataLoader(Numbered(), 6))
    return norms[0], norms[1], weights(module)


@pytest.mark.slow
def test_norms_and_nonfinite_gradients_are_those_of_all_shards() -> None:
    euclidean, largest, skipped = observed(1)
    assert skipped.isfinite().all()
    for rank, found in enumerate(run_ranks(observed, 2, 2, timeout_s=200)):
        if rank == 0:
            assert found[0] == pytest.approx(euclidean, abs=1e-10)
            assert found[1] == pytest.approx(largest, abs=1e-10)
        torch.testing.assert_close(found[2], skipped, rtol=0, atol=1e-10)
