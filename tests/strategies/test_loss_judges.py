"""Callbacks of Lightning that decide by a step's loss decide on ranks as on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from lightning_fabric.utilities.spike import TrainingSpikeException
from pytorch_lightning.callbacks import LearningRateFinder, SpikeDetection
from pytorch_lightning.tuner import Tuner
from regression import Net, Numbered, assert_as_single, trainer_of
from torch.utils.data import DataLoader


class Rated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


def _search(strategy: str, root: Path) -> Any:
    module, data = Rated(), DataLoader(Numbered(93), 6)
    options = {"limit_val_batches": 0, "default_root_dir": root}
    finder = LearningRateFinder(1e-4, 1.0, num_training_steps=40)
    trainer_of(strategy, callbacks=[finder], max_epochs=1, **options).fit(module, data)
    tuner = Tuner(trainer_of(strategy, accumulate_grad_batches=2, **options))
    found = tuner.lr_find(Rated(), data, num_training=30, update_attr=False)
    assert found is not None
    return finder.optimal_lr.results["loss"], module.lr, found.results["loss"], found.suggestion()


@pytest.mark.parametrize("strategy", ["ddp", "weights"])
def test_lightnings_search_for_a_learning_rate_finds_one_devices(strategy: str, tmp_path: Path) -> None:
    # Rank 0's own losses decided, so that ranks trained with another learning rate than one device.
    _, rate, _, _ = assert_as_single(_search, strategy, tmp_path)
    assert rate != 0.01


class Spiking(Net):
    """The loss of its last sample is 21, and that of all others 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) * 0.0 + (batch[2][:, None] == 20) * 21.0).mean()


def _spike(strategy: str, root: Path, limit: float) -> Any:
    detection = SpikeDetection(window=2, warmup=2, atol=limit, rtol=None)
    data = DataLoader(Numbered(21), 7)
    trainer = trainer_of(strategy, callbacks=[detection], limit_val_batches=0, default_root_dir=root, max_epochs=1)
    try:
        trainer.fit(Spiking(), data)
    except TrainingSpikeException as exc:
        return str(exc)
    return "on_train_batch_end" in vars(detection)


def test_a_spike_of_one_ranks_part_is_none_of_the_global_batch(tmp_path: Path) -> None:
    # The last of 7 samples makes the loss of the batch 21 / 7 = 3, and that of its rank's part 21 / 3 = 7.
    found = "Training spike detected in batch 2"
    assert [_spike("single", tmp_path, limit) for limit in (2.0, 5.0)] == [found, False]
    assert run_ranks(_spike, 2, "ddp", tmp_path, 2.0) == [found, found]
    assert run_ranks(_spike, 2, "ddp", tmp_path, 5.0) == [False, False]
