"""The trainer takes a strategy object or a name."""

import pytest
from pytorch_lightning.callbacks import Callback, TQDMProgressBar

from evener.strategies import ConfigError, SingleDeviceStrategy
from evener.trainer import Trainer

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}


def test_a_name_resolves_to_our_strategy() -> None:
    assert type(Trainer(strategy="single_device", devices=1, **QUIET).strategy) is SingleDeviceStrategy


def test_single_device_refuses_two_devices() -> None:
    with pytest.raises(ConfigError, match="single_device: 2 devices were given, but it uses exactly one"):
        Trainer(strategy="single_device", devices=2, **QUIET)


def test_the_bar_that_lightning_appends_to_a_list_of_callbacks_is_the_timed_one() -> None:
    callbacks: list[Callback] = [Callback()]
    trainer = Trainer(callbacks=callbacks, **QUIET | {"enable_progress_bar": True})
    assert trainer.timed_bar is not None


def test_a_bar_that_was_given_keeps_its_own_rate() -> None:
    callbacks: list[Callback] = [TQDMProgressBar(refresh_rate=7)]
    assert Trainer(callbacks=callbacks, **QUIET | {"enable_progress_bar": True}).timed_bar is None
