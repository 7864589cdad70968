"""Values that the hook of an epoch computes from what steps collected, which differ by rank, are warned of."""

import warnings
from typing import Any

import pytest
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy, SingleDeviceStrategy


class Collects(Net):
    """Collects errors in lists, the idiom of Lightning 2; what evaluation collects is joined: tests/acceptance."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        error = (self.net(batch[0]) - batch[1]).square()
        self.errors += error.detach()
        return error.mean()

    def on_train_epoch_end(self) -> None:
        mean = torch.cat(self.errors).mean()
        self.log("own", mean)
        self.log("by size", mean, sync_dist=True, batch_size=len(self.errors))
        self.log("epoch", float(self.current_epoch))  # the same on all ranks: nothing to say
        self.errors.clear()


def _fit(num_ranks: int) -> tuple[float, list[str]]:
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    trainer = quiet_trainer(strategy, num_ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Collects(), DataLoader(Numbered(9), 4))
    told = [str(warning.message) for warning in caught if "is another one on each rank" in str(warning.message)]
    return float(trainer.callback_metrics["by size"]), told


def test_a_value_that_differs_by_rank_is_warned_of_once_and_with_its_number_of_samples_it_is_one_devices() -> None:
    single, _ = _fit(1)
    (first, told), (second, others) = run_ranks(_fit, 2, 2)
    assert [first, second] == pytest.approx([single] * 2, abs=1e-10)
    assert [message.partition(":")[0] for message in told] == ["self.log('own') in on_train_epoch_end"]
    assert others == []  # only rank 0 speaks
