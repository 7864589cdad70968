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


def observed(num: int) -> tuple[list[float], Tensor]:
    """Norms of two kinds, and the weights after a training of which one step is skipped."""
    tape = Points()
    for norm_type in (2.0, torch.inf):
        pl.seed_everything(7, verbose=False)
        strategy = FSDPStrategy(batch_size_is="global", timeout_s=60) if num > 1 else SingleDeviceStrategy()
        options: dict[str, Any] = {"logger": tape, "log_every_n_steps": 1, "detect_nonfinite": "skip_step"}
        trainer = quiet_trainer(strategy, num, callbacks=[GradientNorm(norm_type)], **options)
        trainer.fit(module := Overflowing(), DataLoader(Numbered(), 6))
    return [value for _, value in tape.of("gradient/norm")], weights(module)


@pytest.mark.slow
def test_norms_and_nonfinite_gradients_are_those_of_all_shards() -> None:
    norms, skipped = observed(1)
    assert skipped.isfinite().all()
    (found, trained), (_, also) = run_ranks(observed, 2, 2, timeout_s=200)
    assert found == pytest.approx(norms, abs=1e-10)
    torch.testing.assert_close([trained, also], [skipped] * 2, rtol=0, atol=1e-10)
