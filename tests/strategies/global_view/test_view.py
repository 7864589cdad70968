"""`strategy.global_view=true`: ddp trains any module as one device does, random numbers and BatchNorm included."""

import functools
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # as modules write it
from distributed import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from evener.strategies import (
    BalancedDataParallelStrategy,
    BalancedDDPModelParallelStrategy,
    BalancedDDPStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer

EXACT = 1e-10
FEATURES, CLASSES = 5, 3


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


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
    "noise": lambda z, y: (z + torch.randn_like(z) + torch.rand(z.shape)).pow(2).mean(),
}


MIXED = ["pairs"]
"""Those whose parts differ, whatever the numbers are, and which no program of sums makes."""


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
    warnings.simplefilter("ignore")  # Lightning's advice; an error would end the rank
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(3, verbose=False)
    module = Everything(form)
    data = TensorDataset(torch.randn(21, FEATURES), torch.randint(0, CLASSES, (21,)))
    loaders = DataLoader(data, batch_size=batch, shuffle=True), DataLoader(data, batch_size=batch)
    trainer = Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, *loaders)
    numbers = {key: value.double() for key, value in trainer.callback_metrics.items()}
    return {key: whole(value).clone() for key, value in module.state_dict().items()} | numbers


def _train_all(strategy: Any, size_is: Any, batch: int) -> dict[str, dict[str, Tensor]]:
    num = int(os.environ["WORLD_SIZE"])
    made = (strategy(batch_size_is=size_is, global_view=True, timeout_s=60) for _ in LOSSES)
    return {form: _fit(one, num, form, batch) for form, one in zip(LOSSES, made, strict=True)}


def _train_mixed(
    strategy: Any, devices: int, batch: int, forms: Sequence[str] = MIXED
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    told = list[str]()
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addHandler(handler)
    found = {form: _fit(strategy(), devices, form, batch) for form in forms}
    return found, [line for line in told if "global_view" in line]


@functools.cache
def expected(*forms: str) -> dict[str, dict[str, Tensor]]:
    """What one device has after training with batches of 8, by the name of the loss."""
    return run_ranks(_references, 1, forms)[0]


@pytest.mark.parametrize(
    ("strategy", "ranks", "size_is", "batch"),
    [
        (DDPStrategy, 2, "global", 8),
        (DDPStrategy, 3, "global", 8),
        (DDPStrategy, 2, "per_device", 4),
        (FSDPStrategy, 2, "global", 8),
    ],
)
def test_every_form_trains_as_one_device_does(strategy: type, ranks: int, size_is: str, batch: int) -> None:
    for found in run_ranks(_train_all, ranks, strategy, size_is, batch):
        for form, values in expected(*LOSSES).items():
            assert found[form].keys() == values.keys()
            for key, value in values.items():
                torch.testing.assert_close(found[form][key], value, rtol=EXACT, atol=EXACT, msg=f"{form}: {key}")


def _ddp(strategy: Any = DDPStrategy, **options: Any) -> Any:
    return partial(strategy, **{"batch_size_is": "global", "timeout_s": 60, **options})


ROWS = "steps see the global batch (strategy.global_view), which is exact but slower"
ALL = "each rank computes all of the global batch (strategy.global_view), which is exact but no faster than one rank"
ON_RANKS = {
    "ddp": (_ddp(), 2, 8, ROWS),
    "ddp, batches per device": (_ddp(batch_size_is="per_device"), 2, 4, ROWS),
    "balanced_ddp": (_ddp(BalancedDDPStrategy, weights=[1, 2]), 2, 8, ROWS),
    "fsdp": (_ddp(FSDPStrategy, batch_size_is="per_device"), 2, 4, ROWS),
    "fsdp, recomputing": (_ddp(FSDPStrategy, recompute=["net.4"]), 2, 8, ALL),
    "fsdp, synchronized": (_ddp(FSDPStrategy, sync_batchnorm=True), 2, 8, ALL),
    "replicas": (_ddp(devices_per_process=2), 4, 8, ALL),
    "shards": (_ddp(shard_optimizer=True), 2, 8, ALL),
    "compressed": (_ddp(compression="fp16", batch_size_is="per_device"), 2, 4, ALL),
    "recomputing": (_ddp(recompute=["net.4"]), 2, 8, ALL),
    "synchronized": (_ddp(sync_batchnorm=True), 2, 8, ALL),
    "stages": (_ddp(DDPModelParallelStrategy, num_microbatches=2), 4, 8, ALL),
}
"""Strategies of two ranks, their devices, the loader's batch, and how whole batches are computed."""


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_module_that_parts_would_train_otherwise_is_trained_so_without_a_word_of_config(name: str) -> None:
    strategy, devices, batch, how = ON_RANKS[name]
    for rank, (found, told) in enumerate(run_ranks(_train_mixed, 2, strategy, devices, batch)):
        _verify_mixed(found)
        assert len(told) == (len(MIXED) if rank == 0 else 0)
        for line in told:
            assert re.match(r"\w+: computed in ranks of [\d, ]+ and \d samples, the gradient of .* differs .*%", line)
            assert line.endswith(f". So {how}; evener.over_batch(fn) is faster.")


def _verify_mixed(found: Any) -> None:
    for form, values in expected(*MIXED).items():
        for key, value in values.items():
            torch.testing.assert_close(found[form][key], value, rtol=EXACT, atol=EXACT, msg=f"{form}: {key}")


@pytest.mark.parametrize(
    ("strategy", "devices", "how"),
    [
        (DataParallelStrategy, 2, "on the first device alone"),
        (partial(DataParallelStrategy, model_parallel_size=2), 4, "on the first device alone"),
        (partial(BalancedDataParallelStrategy, gpu0_chunk=0), 3, "on the first device alone"),
        (BalancedDataParallelStrategy, 2, "on the first device alone"),
        (partial(ModelParallelStrategy, num_microbatches=2), 2, "without micro-batches"),
    ],
)
def test_one_process_gives_it_whole_batches(strategy: Any, devices: int, how: str) -> None:
    found, told = run_ranks(_train_mixed, 1, strategy, devices, 8)[0]
    _verify_mixed(found)
    told = [line for line in told if "training_step" in line]
    assert len(told) == len(MIXED)
    for line in told:
        assert re.match(r"\w+: computed in chunks of 4, 3 and 1 samples, the gradient of .* differs .*%", line)
        assert line.endswith(
            f"So training_step gets whole batches (strategy.global_view), {how}; evener.over_batch(fn) is faster."
        )


def test_a_step_that_fails_since_its_batch_was_cut_gets_whole_batches_and_the_line_names_its_error() -> None:
    # one that fails on its rank, whatever its samples are, ends the run: test_launcher.py, test_notebook.py
    (expected, _), *_ = run_ranks(_train_five, 1, SingleDeviceStrategy, 1)
    (found, told), *_ = run_ranks(_train_five, 2, ON_RANKS["ddp"][0], 2)
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
    assert len(told) == 1
    assert re.match(r"ddp: training_step fails on parts of a batch \(RuntimeError: .*tensor a \(3\)", told[0])


def _train_five(strategy: Any, devices: int) -> Any:
    LOSSES["five"] = lambda z, y: (z[:5] - torch.ones(5, CLASSES)).pow(2).mean()
    return _train_mixed(strategy, devices, 8, ["five"])


def _references(forms: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    return {form: _fit(SingleDeviceStrategy(), 1, form, 8) for form in forms}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("shard_optimizer", True), ("compression", "fp16"), ("recompute", "always"), ("sync_batchnorm", True),
        ("devices_per_process", 2),
    ],
)  # fmt: skip
def test_options_that_it_has_no_use_for_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^ddp: global_view=true .*\. Leave out {option}\.$"):
        DDPStrategy(global_view=True, **{option: value})


@pytest.mark.parametrize("other", [BalancedDDPStrategy, DDPModelParallelStrategy, BalancedDDPModelParallelStrategy])
def test_strategies_that_compute_otherwise_refuse_it(other: type[DDPStrategy]) -> None:
    # those of stages told to leave out `devices_per_process`, which nobody had given
    with pytest.raises(ConfigError, match=rf"^{other.strategy_name}: global_view=true .* Leave out global_view\.$"):
        other(global_view=True)


def test_what_ddp_refuses_names_it_as_the_remedy() -> None:
    for told in run_ranks(_told_of_pairs, 2):
        assert "leave out DDPStrategy(global_view=False), or set" in told


def _told_of_pairs() -> str:
    with pytest.raises(ConfigError) as told:
        _fit(DDPStrategy(batch_size_is="global", global_view=False, timeout_s=60), 2, "pairs", 8)
    return str(told.value)


def test_the_log_tells_what_was_computed_on_all_rows_and_what_that_took() -> None:
    first, other = run_ranks(_told_at_the_end, 2)
    assert not other
    assert re.fullmatch(r"global view: .*\bindex \(\d+×, \S+ MB, \S+ ms/step\).*", first[-1])


def _told_at_the_end() -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addHandler(handler)
    _fit(DDPStrategy(batch_size_is="global", global_view=True, timeout_s=60), 2, "masked", 8)
    return told


NO_INDICES = r"^global_view joins a loader's batches by indices, which this one lacks\. Set batch_size_is=global"
REFUSED = {
    "stream": NO_INDICES,
    "whole batches": NO_INDICES,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cant_see_or_join_is_refused_with_the_remedy(what: str) -> None:
    assert run_ranks(_refused, 2, what) == [0, 0]


def _refused(what: str) -> int:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    module, data = Everything("mean"), TensorDataset(torch.randn(8, FEATURES), torch.zeros(8, dtype=torch.int64))
    given: Any = list(DataLoader(data, 4)) if what == "stream" else DataLoader(data, 4)
    if what == "whole batches":
        batches: Any = [data[:4], data[4:]]
        given = DataLoader(batches, batch_size=None)
    trainer = Trainer(
        strategy=DDPStrategy(global_view=True, timeout_s=60), devices=2, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=REFUSED[what]):
        trainer.fit(module, given)
    return trainer.global_step


class Kept:
    """Batches that are read anew in each epoch, with what was written to them."""

    def __init__(self) -> None:
        self.batches = [torch.randn(5, 4), torch.randn(4, 4)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


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


def test_what_a_step_writes_to_a_batch_is_there_when_it_is_read_again() -> None:
    # each rank had written to its rows alone, and the ranks read different batches in the second epoch
    expected = run_ranks(_written_batches, 1)[0]
    for found in run_ranks(_written_batches, 2):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


def _written_batches() -> list[Tensor]:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(3, verbose=False)
    devices, module, data = int(os.environ["WORLD_SIZE"]), Writes(), Kept()
    view = DDPStrategy(batch_size_is="global", global_view=True, timeout_s=60)
    trainer = Trainer(
        strategy=view if devices > 1 else SingleDeviceStrategy(), devices=devices, accelerator="cpu", max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return [*module.parameters(), *data.batches]


class Late(pl.Callback):
    """Begins later on rank 1, whose clock then is another than rank 0's."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        time.sleep(0.4 * trainer.global_rank)

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.01)


def test_ranks_end_at_the_same_step_when_time_is_up() -> None:
    # each was the only one of its run, and went by its own clock
    first, second = run_ranks(_steps_in_time, 2)
    assert 0 < first == second


def _steps_in_time() -> int:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(8, FEATURES), torch.zeros(8, dtype=torch.int64))
    trainer = Trainer(
        strategy=DDPStrategy(global_view=True, timeout_s=8), devices=2, accelerator="cpu", max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Late()],
        max_time=timedelta(seconds=1),
    )  # fmt: skip
    trainer.fit(Everything("mean"), DataLoader(data, 4))
    return trainer.global_step
