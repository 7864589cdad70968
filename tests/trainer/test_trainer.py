"""The trainer takes a strategy object or a name."""

import pytest

from evener.strategies import ConfigError, SingleDeviceStrategy
from evener.trainer import Trainer

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}


def test_a_name_resolves_to_our_strategy() -> None:
    assert type(Trainer(strategy="single_device", devices=1, **QUIET).strategy) is SingleDeviceStrategy


def test_single_device_refuses_two_devices() -> None:
    with pytest.raises(ConfigError, match="single_device: 2 devices were given, but it uses exactly one"):
        Trainer(strategy="single_device", devices=2, **QUIET)
