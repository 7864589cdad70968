"""The trainer takes a strategy object or a name."""

import pickle
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, TQDMProgressBar
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.strategies import StrategyRegistry
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

from evener.strategies import STRATEGIES, ConfigError, DDPStrategy, SingleDeviceStrategy
from evener.strategies.ranks.strategy import RankStrategy
from evener.strategies.registry import LIGHTNINGS_WORDS
from evener.trainer.checkpoint.checkpoint_io import VerifiedCheckpointIO


def test_a_name_in_any_letters_is_ours_and_an_unknown_one_is_refused() -> None:
    # Lightning puts the word in lower case, so that its own strategy of the name was taken
    assert type(quiet(strategy="single_device", devices=1).strategy) is SingleDeviceStrategy
    assert type(quiet(strategy="DDP", devices=2).strategy) is DDPStrategy
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='balanced_dpp'`"):
        quiet(strategy="balanced_dpp")


def test_lightnings_words_for_ddp_and_fsdp_take_our_strategies() -> None:
    # Lightning's own were taken, under which none of this project's promises hold
    known = {word for word in StrategyRegistry.available_strategies() if word.startswith(("ddp", "fsdp"))}
    assert known <= {*LIGHTNINGS_WORDS, *STRATEGIES}
    for word in known:
        assert isinstance(quiet(strategy=word, devices=2).strategy, RankStrategy), word
    strategy: Any = quiet(strategy="ddp_spawn_find_unused_parameters_true", devices=2).strategy
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    assert strategy._given_start_method == "spawn"


@pytest.mark.parametrize("devices", ['["cpu","cpu"]', "cpu,cpu"])
def test_devices_may_be_the_text_of_a_list_of_names(devices: str) -> None:
    # LightningCLI gives it so: `devices` selected with `CPUAccelerator` should be an int > 0
    strategy: Any = quiet(strategy="dp", devices=devices).strategy
    assert strategy.parallel_devices == [torch.device("cpu")] * 2
    with pytest.raises(ConfigError, match="devices: 'gpus' is not a device"):
        quiet(strategy="dp", devices="gpus")


def test_auto_is_one_of_our_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning's own DDP was taken for `devices=2`, under which none of this project's promises hold.
    assert type(quiet(devices=1).strategy) is SingleDeviceStrategy
    trainer = quiet(devices=2, precision="64-true", sync_batchnorm=True)
    assert type(trainer.strategy) is DDPStrategy
    assert (trainer.world_size, trainer.precision) == (2, "64-true")
    assert type(trainer.strategy.checkpoint_io) is VerifiedCheckpointIO
    assert trainer.strategy._layer_sync is not None
    assert quiet(devices=2, num_nodes=2).world_size == 4
    monkeypatch.setenv("PL_TRAINER_DEVICES", "2")
    assert type(quiet().strategy) is DDPStrategy


def test_the_bar_that_lightning_appends_is_drawn_by_time_and_a_given_one_keeps_its_rate() -> None:
    assert quiet(callbacks=[Callback()], enable_progress_bar=True).timed_bar is not None
    assert quiet(callbacks=[TQDMProgressBar(refresh_rate=7)], enable_progress_bar=True).timed_bar is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "single_device", "devices": 2}, "single_device: 2 devices were given, but it uses exactly one"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0 is not allowed"),
    ],
)
def test_arguments_with_which_lightning_fails_unnamed_are_refused(arguments: dict[str, Any], message: str) -> None:
    # 'str' object has no attribute 'on_exception', a bare AssertionError, integer modulo by zero
    with pytest.raises(ConfigError, match=message):
        quiet(**arguments)


def test_what_names_no_device_is_refused_as_lightning_refuses_it() -> None:
    # Every string in a list was taken for a device's name, and refused with another type of error than Lightning's.
    with pytest.raises(TypeError, match="should be an int > 0"):
        quiet(devices=[0, "1"])


def test_a_trainer_can_be_pickled_after_a_run() -> None:
    # "args[0] from __newobj__ args has the wrong class", of what keeps a loader's position
    trainer = quiet(fast_dev_run=True)
    trainer.fit(BoringModel())
    again = pickle.loads(pickle.dumps(trainer))
    assert again.global_step == 1
    assert len(again.train_dataloader) == 64


def test_after_a_scripts_ranks_have_trained_the_number_of_steps_is_known() -> None:
    # It ended in a bare AssertionError.
    trainer = quiet(strategy="ddp", devices=2, max_epochs=3)
    trainer.fit(Tiny(), DataLoader(torch.rand(16, 1), 2))
    assert trainer.estimated_stepping_batches == 3 * 4
