"""Values that an epoch's hook computes from what steps collected: exact, or warned of."""

import warnings
from typing import Any

import pytest
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, DDPStrategy, SingleDeviceStrategy


class Collects(Net):
    """Collects errors in lists, the idiom of Lightning 2; `options` are those of `self.log` in the epoch's hooks."""

    def __init__(self, options: dict[str, Any], weighted: bool) -> None:
        super().__init__()
        self.options, self.by_size = options, weighted
        self.train_errors: list[Tensor] = []
        self.val_errors: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        error = (self.net(batch[0]) - batch[1]).square()
        self.train_errors += error.detach()
        return error.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_errors += (self.net(batch[0]) - batch[1]).square()

    def _log(self, name: str, errors: list[Tensor]) -> None:
        options = self.options | ({"batch_size": len(errors)} if self.by_size else {})
        self.log(name, torch.cat(errors).mean(), **options)
        errors.clear()

    def on_train_epoch_end(self) -> None:
        self._log("train", self.train_errors)
        self.log("epoch", float(self.current_epoch))  # the same on all ranks: nothing to say

    def on_validation_epoch_end(self) -> None:
        self._log("val", self.val_errors)


def _fit(num_ranks: int, options: dict[str, Any], weighted: bool, sanity: int) -> Any:
    module = Collects(options, weighted)
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    trainer = quiet_trainer(strategy, num_ranks, num_sanity_val_steps=sanity)
    loader = DataLoader(Numbered(9), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader, loader)
        except ConfigError as exc:
            return trainer.global_step, str(exc)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values, [str(warning.message) for warning in caught if "is another one on each rank" in str(warning.message)]


def test_values_of_evaluations_are_one_devices_and_those_of_training_are_warned_of_once() -> None:
    single, _ = _fit(1, {}, False, 2)
    (first, told), (second, others) = run_ranks(_fit, 2, 2, {}, False, 2)
    assert first["val"] == pytest.approx(single["val"], abs=1e-10)
    assert second["val"] == pytest.approx(single["val"], abs=1e-10)
    assert [message.partition(":")[0] for message in told] == ["self.log('train') in on_train_epoch_end"]
    assert others == []  # only rank 0 speaks


def test_with_the_number_of_samples_the_values_are_one_devices() -> None:
    single, _ = _fit(1, {"sync_dist": True}, True, 2)
    for values, messages in run_ranks(_fit, 2, 2, {"sync_dist": True}, True, 2):
        assert values == pytest.approx(single, abs=1e-10)
        assert messages == []
