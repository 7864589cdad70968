"""`strategy.global_view=true`: ddp trains any module as one device does, random numbers and BatchNorm included."""

import functools
import logging
import os
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # as modules write it
from distributed import run_ranks
from regression import quiet_trainer, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from evener.strategies import (
    BalancedDDPModelParallelStrategy,
    BalancedDDPStrategy,
    ConfigError,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)

EXACT = 1e-10
FEATURES, CLASSES = 5, 3


def _dice(z: Tensor, y: Tensor) -> Tensor:
    hit = F.one_hot(y, CLASSES)
    return 1 - 2 * (z.softmax(1) * hit).sum() / (z.softmax(1).pow(2).sum() + hit.sum())


def _decided(z: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(z, y)
    return loss * (2 if loss.item() > 1.05 else 1) + z[: len(z) // 2].pow(2).sum() / len(z)


def _written(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.ones_like(z)
    weight[0] = 3.0
    weight[:, 1] *= 0.5
    return (z.pow(2) * weight).mean()


LOSSES: dict[str, Any] = {
    "mean": F.cross_entropy,
    "root": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z)).sqrt(),
    "dice": _dice,
    "pairs": lambda z, y: (F.normalize(z, dim=1) @ F.normalize(z, dim=1).T).logsumexp(1).mean(),
    "variance": lambda z, y: F.relu(1 - z.var(0).sqrt()).mean(),
    "masked": lambda z, y: z[y > 0].pow(2).mean(),
    "hardest": lambda z, y: F.cross_entropy(z, y, reduction="none").topk(2).values.mean(),
    "decided": _decided,
    "compiled": torch.compile(_dice, backend="aot_eager"),
    "written": _written,
    "hooked": F.cross_entropy,
    "five": lambda z, y: (z[:5] - torch.ones(5, CLASSES)).pow(2).mean(),
    "noise": lambda z, y: (z + torch.randn_like(z) + torch.rand(z.shape)).pow(2).mean(),
}


class Everything(pl.LightningModule):
    """A module with dropout and BatchNorm, and a loss of a name."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )
        if form == "hooked":
            self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.form, self.mean, self.outs = form, MeanMetric(), list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = LOSSES[self.form](self.net(x), y)
        self.mean(loss)
        self.log("train", loss)
        self.log("num", float(len(x)), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outs.append(self.net(batch[0]).detach())
        self.log("val", LOSSES[self.form](self.outs[-1], batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("median", torch.cat(self.outs).median())
        self.outs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _fit(strategy: Any, devices: int, form: str, batch: int) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(3, verbose=False)
    module = Everything(form)
    data = TensorDataset(torch.randn(21, FEATURES), torch.randint(0, CLASSES, (21,)))
    loaders = DataLoader(data, batch_size=batch, shuffle=True), DataLoader(data, batch_size=batch)
    trainer = quiet_trainer(strategy, devices)
    trainer.fit(module, *loaders)
    numbers = {key: value.double() for key, value in trainer.callback_metrics.items()}
    return {key: whole(value).clone() for key, value in module.state_dict().items()} | numbers


def _train_all(strategy: Any, size_is: Any, batch: int) -> dict[str, dict[str, Tensor]]:
    num = int(os.environ["WORLD_SIZE"])
    made = (strategy(batch_size_is=size_is, global_view=True, timeout_s=60) for _ in LOSSES)
    return {form: _fit(one, num, form, batch) for form, one in zip(LOSSES, made, strict=True)}


def _train(ways: dict[str, tuple[Any, ...]], form: str = "pairs") -> list[tuple[dict[str, Tensor], list[str]]]:
    """Train in all ways with a loss whose parts differ, whatever the numbers are; what that left, and what was told."""
    told = list[str]()
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addHandler(handler)
    found = []
    for strategy, devices, batch, *_ in ways.values():
        told.clear()
        found.append(
            (_fit(strategy(), devices, form, batch), [line for line in told if "strategy.global_view" in line])
        )
    return found


def _references(forms: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    return {form: _fit(SingleDeviceStrategy(), 1, form, 8) for form in forms}


@functools.cache
def expected(*forms: str) -> dict[str, dict[str, Tensor]]:
    """What one device has after training with batches of 8, by the name of the loss."""
    return run_ranks(_references, 1, forms)[0]


@pytest.mark.parametrize(
    ("strategy", "ranks", "size_is", "batch"),
    [
        (DDPStrategy, 3, "global", 8),
        (DDPStrategy, 2, "per_device", 4),
        (FSDPStrategy, 2, "global", 8),
    ],
)
def test_every_form_trains_as_one_device_does(strategy: type, ranks: int, size_is: str, batch: int) -> None:
    for found in run_ranks(_train_all, ranks, strategy, size_is, batch):
        torch.testing.assert_close(found, expected(*LOSSES), rtol=EXACT, atol=EXACT)


def _ddp(strategy: Any = DDPStrategy, **options: Any) -> Any:
    return partial(strategy, **{"batch_size_is": "global", "timeout_s": 60, **options})


ROWS = "steps see the global batch (strategy.global_view), which is exact but slower"
ALL = "each rank computes all of the global batch (strategy.global_view), which is exact but no faster than one rank"
ON_RANKS = {
    "ddp": (_ddp(), 2, 8, ROWS),
    "balanced_ddp": (_ddp(BalancedDDPStrategy, weights=[1, 2]), 2, 8, ROWS),
    "fsdp": (_ddp(FSDPStrategy, batch_size_is="per_device"), 2, 4, ROWS),
    "fsdp, recomputing": (_ddp(FSDPStrategy, recompute=["net.4"]), 2, 8, ALL),
    "replicas": (_ddp(devices_per_process=2), 4, 8, ALL),
    "shards": (_ddp(shard_optimizer=True), 2, 8, ALL),
    "compressed": (_ddp(compression="fp16", batch_size_is="per_device"), 2, 4, ALL),
    "synchronized": (_ddp(sync_batchnorm=True), 2, 8, ALL),
    "stages": (_ddp(DDPModelParallelStrategy, num_microbatches=2), 4, 8, ALL),
}
"""Strategies of two ranks, their devices, the loader's batch, and how whole batches are computed."""


def test_a_module_that_parts_would_train_otherwise_is_trained_so_without_a_word_of_config() -> None:
    first, other = run_ranks(_train, 2, ON_RANKS)
    for (name, (*_, how)), (trained, [line]), (by_other, nothing) in zip(ON_RANKS.items(), first, other, strict=True):
        for found in (trained, by_other):
            torch.testing.assert_close(found, expected("pairs")["pairs"], rtol=EXACT, atol=EXACT)
        assert nothing == []
        assert re.match(r"\w+: computed in ranks of [\d, ]+ and \d samples, the gradient of .* differs .*%", line), name
        assert line.endswith(f". So {how}; evener.over_batch(fn) is faster."), name


def test_a_step_that_fails_since_its_batch_was_cut_gets_whole_batches_and_the_line_names_its_error() -> None:
    # one that fails on its rank, whatever its samples are, ends the run: test_launcher.py, test_notebook.py
    [(found, [line])], _ = run_ranks(_train, 2, {"ddp": ON_RANKS["ddp"]}, "five")
    torch.testing.assert_close(found, expected("five")["five"], rtol=EXACT, atol=EXACT)
    assert re.match(r"ddp: training_step fails on parts of a batch \(RuntimeError: .*tensor a \(\d\)", line)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((DDPStrategy, {"shard_optimizer": True}), (DDPStrategy, {"compression": "fp16"})),
        *((DDPStrategy, {"recompute": "always"}), (DDPStrategy, {"sync_batchnorm": True})),
        (DDPStrategy, {"devices_per_process": 2}),
        # those of stages told to leave out `devices_per_process`, which nobody had given
        *((one, {}) for one in (BalancedDDPStrategy, DDPModelParallelStrategy, BalancedDDPModelParallelStrategy)),
    ],
)
def test_what_it_has_no_use_for_is_refused_by_name(kind: type[DDPStrategy], options: dict[str, Any]) -> None:
    out = next(iter(options), "global_view")
    with pytest.raises(ConfigError, match=rf"^{kind.strategy_name}: global_view=true .*\. Leave out {out}\.$"):
        kind(global_view=True, **options)


def _refused() -> None:
    torch.set_default_dtype(torch.float64)
    batches = [(torch.randn(4, FEATURES), torch.zeros(4, dtype=torch.int64)) for _ in range(2)]
    told = r"^global_view joins a loader's batches by indices, which this one lacks\. Set batch_size_is=global"
    for loader in (batches, DataLoader(batches, batch_size=None)):  # type: ignore[arg-type]
        trainer = quiet_trainer(DDPStrategy(global_view=True, timeout_s=60), 2)
        with pytest.raises(ConfigError, match=told):
            trainer.fit(Everything("mean"), loader)
        assert trainer.global_step == 0


def test_batches_that_it_can_not_join_are_refused_with_the_remedy() -> None:
    run_ranks(_refused, 2)


class Writes(pl.LightningModule):
    """Writes to its batch in all ways: to all of it, to views of another shape, of a column and of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch.mul_(0.9)
        batch.view(-1)[2:6].add_(0.1)
        batch[0] = 0.5
        batch[:, 1].mul_(1.1)
        batch.flatten(1).sub_(0.01)
        return self.net(batch).pow(2).mean() + self.net(batch[torch.arange(len(batch) - 1)]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _written_batches() -> list[Tensor]:
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(3, verbose=False)
    devices, module = int(os.environ["WORLD_SIZE"]), Writes()
    batches = [torch.randn(5, 4), torch.randn(4, 4)]  # read anew in each epoch, with what was written to them
    view = DDPStrategy(batch_size_is="global", global_view=True, timeout_s=60)
    strategy = view if devices > 1 else SingleDeviceStrategy()
    quiet_trainer(strategy, devices, max_epochs=3).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return [*module.parameters(), *batches]


def test_what_a_step_writes_to_a_batch_is_there_when_it_is_read_again() -> None:
    # each rank had written to its rows alone, and the ranks read different batches in the second epoch
    expected = run_ranks(_written_batches, 1)[0]
    for found in run_ranks(_written_batches, 2):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


class Late(pl.Callback):
    """Begins later on rank 1, whose clock then is another than rank 0's."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        time.sleep(0.4 * trainer.global_rank)

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.01)


def _steps_in_time() -> int:
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(8, FEATURES), torch.zeros(8, dtype=torch.int64))
    options: Any = {"max_epochs": -1, "callbacks": [Late()], "max_time": timedelta(seconds=1)}
    trainer = quiet_trainer(DDPStrategy(global_view=True, timeout_s=8), 2, **options)
    trainer.fit(Everything("mean"), DataLoader(data, 4))
    return trainer.global_step


def test_ranks_end_at_the_same_step_when_time_is_up() -> None:
    # each was the only one of its run, and went by its own clock
    first, second = run_ranks(_steps_in_time, 2)
    assert 0 < first == second
