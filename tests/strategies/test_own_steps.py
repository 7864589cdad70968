"""What decides about steps itself does so as on one device: manual optimization, schedulers, judges of the loss."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from distributed import run_ranks
from lightning_fabric.utilities.spike import TrainingSpikeException
from pytorch_lightning.callbacks import LearningRateFinder, SpikeDetection
from pytorch_lightning.tuner import Tuner
from regression import Net, Numbered, assert_as_single, assert_same, quiet_trainer, trainer_of, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.strategies import BalancedDataParallelStrategy, DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy


class Accumulated(pl.LightningModule):
    """One optimizer that steps every second batch, plateaus, hooks of parameters, and a loss over the batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)).double()
        self.seen: dict[int, float] = {}  # not a list: it would be taken for results of the steps
        self.net[0].weight.register_hook(lambda g: self.seen.update({len(self.seen): float(g.sum())}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        z = self.net(batch[1])
        loss = F.mse_loss(z, batch[0]) + evener.over_batch(lambda z: z.std(0).sum())(z)
        self.manual_backward(loss / 2, retain_graph=False)
        if batch_idx % 2:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        return [optimizer], [ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)]


def _fit_accumulated(strategy: Any, devices: int = 1) -> tuple[Any, list[float]]:
    torch.manual_seed(3)
    module = Accumulated()
    data = TensorDataset(torch.randn(28, 4, dtype=torch.float64), torch.randn(28, 3, dtype=torch.float64))
    trainer = quiet_trainer(strategy, devices)
    trainer.fit(module, DataLoader(data, batch_size=7))
    return (weights(module), trainer.global_step), list(module.seen.values())


@pytest.mark.parametrize(
    "strategy",
    [lambda: BalancedDataParallelStrategy(gpu0_chunk=0), lambda: ModelParallelStrategy(num_microbatches=2)],
)
def test_manual_optimization_in_one_process_has_whole_batches(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected, sums = _fit_accumulated(SingleDeviceStrategy())
    made = strategy()
    with caplog.at_level("INFO"):
        found, seen = _fit_accumulated(made, 2)
    assert isinstance(made, ModelParallelStrategy) or "optimizes manually" in caplog.text  # the other warns
    assert_same(found, expected, 1e-10)
    assert seen[-len(sums) :] == pytest.approx(sums, abs=1e-10)  # after looks at parts


def test_manual_optimization_on_replicas_of_ranks_trains_as_on_one_device() -> None:
    expected, _ = _fit_accumulated(SingleDeviceStrategy())
    replicas = DDPStrategy(devices_per_process=2, batch_size_is="global")
    for found, _ in run_ranks(_fit_accumulated, 2, replicas, 4):
        assert_same(found, expected, 1e-10)


class Stepping(Net):
    """Steps a plateau scheduler by its loss: in the step, as it is or as `callback_metrics` has it, or in its own hook,
    which gets another value than the one that is monitored."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.automatic_optimization = reads == "hook"
        self.reads = reads
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.last = loss.detach()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        scheduler: Any = self.lr_schedulers()
        scheduler.step(self.last if self.reads == "loss" else self.trainer.callback_metrics["loss"])
        return None

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.last)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        scheduler: Any = self.lr_schedulers()
        self.rates.append(scheduler.get_last_lr()[0])

    def on_train_epoch_end(self) -> None:
        scheduler: Any = self.lr_schedulers()
        scheduler.step(1.0)  # the same on all ranks

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        config = {"scheduler": scheduler, "interval": "step", "monitor": "none", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "reduce_on_plateau": False}}


def _fit_stepping(strategy: str, reads: str) -> Any:
    module = Stepping(reads)
    trainer = trainer_of(strategy, limit_val_batches=0)
    trainer.fit(module, DataLoader(Numbered(17), batch_size=4))  # one rank has no part of the last batch
    config = trainer.lr_scheduler_configs[0]
    return module.rates, type(config.scheduler) is ReduceLROnPlateau, sorted(config.scheduler.state_dict())


@pytest.mark.parametrize(
    ("strategy", "reads"),
    [("ddp", "loss"), ("weights", "step"), ("ddp", "hook"), ("shards", "loss")],
)
def test_a_module_that_steps_a_plateau_scheduler_has_one_devices_rates(strategy: str, reads: str) -> None:
    # Each rank stepped it by its own loss, and went on with a learning rate of its own.
    rates, is_plain, state = _fit_stepping("single", reads)
    assert len(set(rates)) > 3
    for found in run_ranks(_fit_stepping, 2, strategy, reads):
        assert found == (pytest.approx(rates, rel=1e-12), is_plain, state)


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
