"""Values that an epoch's hook computes from what steps collected: exact, or warned of."""

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
    """Collects errors in lists, the idiom of Lightning 2; `by_size` says how its hooks log their means."""

    def __init__(self, by_size: bool) -> None:
        super().__init__()
        self.by_size = by_size
        self.train_errors: list[Tensor] = []
        self.val_errors: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        error = (self.net(batch[0]) - batch[1]).square()
        self.train_errors += error.detach()
        return error.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_errors += (self.net(batch[0]) - batch[1]).square()

    def _log(self, name: str, errors: list[Tensor]) -> None:
        options: dict[str, Any] = {"sync_dist": True, "batch_size": len(errors)} if self.by_size else {}
        self.log(name, torch.cat(errors).mean(), **options)
        errors.clear()

    def on_train_epoch_end(self) -> None:
        self._log("train", self.train_errors)
        self.log("epoch", float(self.current_epoch))  # the same on all ranks: nothing to say

    def on_validation_epoch_end(self) -> None:
        self._log("val", self.val_errors)


def _fit(num_ranks: int, by_size: bool) -> tuple[dict[str, float], list[str]]:
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    trainer = quiet_trainer(strategy, num_ranks, num_sanity_val_steps=2)
    loader = DataLoader(Numbered(9), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Collects(by_size), loader, loader)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values, [str(warning.message) for warning in caught if "is another one on each rank" in str(warning.message)]


def test_values_of_evaluations_are_one_devices_and_those_of_training_are_warned_of_once() -> None:
    single, _ = _fit(1, False)
    (first, told), (second, others) = run_ranks(_fit, 2, 2, False)
    assert first["val"] == pytest.approx(single["val"], abs=1e-10)
    assert second["val"] == pytest.approx(single["val"], abs=1e-10)
    assert [message.partition(":")[0] for message in told] == ["self.log('train') in on_train_epoch_end"]
    assert others == []  # only rank 0 speaks


def test_with_the_number_of_samples_the_values_are_one_devices() -> None:
    single, _ = _fit(1, True)
    for values, messages in run_ranks(_fit, 2, 2, True):
        assert values == pytest.approx(single, abs=1e-10)
        assert messages == []
