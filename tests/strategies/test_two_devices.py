"""The module that places its own layers trains as the plain one does, and its placement is right."""

from dataclasses import dataclass
from typing import cast

import pytest
import pytorch_lightning as pl
import torch
from placement_check import FakeDevices

from evener.examples.digits import DigitsClassifier, DigitsDataModule
from evener.examples.two_devices import TwoDeviceDigitsClassifier
from evener.strategies import ConfigError, ModelParallelStrategy
from evener.trainer import Trainer


@dataclass
class FakeTrainer:
    strategy: ModelParallelStrategy


# The data is in memory: worker processes would only cost time.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_classifier_on_two_devices_is_the_classifier() -> None:
    torch.manual_seed(0)
    plain = DigitsClassifier()
    by_hand = TwoDeviceDigitsClassifier()
    by_hand.load_state_dict(plain.state_dict())
    runs = ((plain, "single_device", 1), (by_hand, ModelParallelStrategy(partition="manual"), 2))
    losses = []
    for module, strategy, devices in runs:
        pl.seed_everything(0, verbose=False)
        fit = Trainer(
            strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, limit_train_batches=3,
            num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        fit.fit(module, DigitsDataModule())
        losses.append(fit.callback_metrics["val/loss"].item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def on_fake_devices(module: TwoDeviceDigitsClassifier) -> torch.Tensor:
    """Place a module on fake cuda:0 and cuda:1, where operands on different devices fail, and run it."""
    with FakeDevices(2) as fake:
        strategy = ModelParallelStrategy(fake.devices, partition="manual")
        module.trainer = cast(pl.Trainer, FakeTrainer(strategy))
        module.configure_model()
        return fake.run(module, torch.randn(3, 1, 8, 8))


def test_the_two_halves_are_on_two_devices_and_meet_on_the_labels_device() -> None:
    module = TwoDeviceDigitsClassifier()
    logits = on_fake_devices(module)
    assert {str(parameter.device) for parameter in module.features.parameters()} == {"cuda:0"}
    assert {str(parameter.device) for parameter in module.head.parameters()} == {"cuda:1"}
    assert (tuple(logits.shape), logits.device) == ((3, 10), torch.device("cpu"))


class Misplaced(TwoDeviceDigitsClassifier):
    def configure_model(self) -> None:
        first, second = self.trainer.strategy.process_devices
        self.features.to(first)
        self.head[0].to(second)
        self.head[2].to(first)


def test_a_layer_on_the_wrong_device_fails_on_fake_devices() -> None:
    with pytest.raises(ConfigError, match=r"Module head\.2 uses tensors on different devices"):
        on_fake_devices(Misplaced())
