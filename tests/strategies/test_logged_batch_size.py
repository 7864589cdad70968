"""`self.log(..., batch_size=...)`: a constant, or the size of each part, gives one device's values and epoch means."""

import functools
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from parity import FEATURES, Case, make_trainer
from pytorch_lightning.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import (
    BalancedDataParallelStrategy,
    BalancedDDPStrategy,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer


class Logs(pl.LightningModule):
    """Logs a mean over samples, or over tokens, with every kind of `batch_size`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.steps: list[dict[str, float]] = []

    def log_all(self, prefix: str, batch: Any) -> Tensor:
        errors = (self.net(batch[0]).squeeze(1) - batch[0].sum(1)) ** 2
        tokens = (batch[0] > 0).sum(1)
        loss, by_tokens = errors.mean(), (errors * tokens).sum() / tokens.sum().clamp(min=1)
        options: Any = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log(f"{prefix}_constant", errors.square().mean(), batch_size=4, **options)
        self.log(f"{prefix}_loss", loss, batch_size=4, **options)
        self.log(f"{prefix}_sum", errors.sum(), batch_size=len(errors), **options)
        self.log(f"{prefix}_one", errors.sqrt().mean(), batch_size=1, **options)
        self.log(f"{prefix}_own", errors.exp().mean(), batch_size=len(errors), **options)
        self.log(f"{prefix}_number", errors.detach().exp().mean().item(), batch_size=4, **options)
        self.log(f"{prefix}_twice", errors.sin().mean(), batch_size=2 * len(errors), on_epoch=True, on_step=False)
        self.log(f"{prefix}_tokens", by_tokens, batch_size=int(tokens.sum()), on_epoch=True, on_step=False)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.log_all("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all("val", batch)

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.callback_metrics
        self.steps.append({name: float(value) for name, value in logged.items() if name.endswith("_step")})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(strategy: Any, devices: int, num: int, batch_size: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    trainer = make_trainer(Case(), strategy, devices=devices, num_sanity_val_steps=0)
    module = Logs()
    loader = Case(num=num, batch_size=batch_size).loader()
    trainer.fit(module, loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.steps


def assert_same(found: Any, expected: Any) -> None:
    (epoch, steps), (expected_epoch, expected_steps) = found, expected
    # Lightning keeps logged numbers and sums of weights in the default dtype, float32 here
    assert epoch == pytest.approx(expected_epoch, rel=2e-7)
    assert len(steps) == len(expected_steps)
    for step, expected_step in zip(steps, expected_steps, strict=True):
        assert step == pytest.approx(expected_step, rel=2e-7)


@functools.cache
def on_one_device(num: int, batch_size: int) -> Any:
    return fit(SingleDeviceStrategy(), 1, num, batch_size)


IN_ONE_PROCESS: dict[str, tuple[int, Any]] = {
    "dp": (3, DataParallelStrategy),
    "gpu0_chunk=0": (3, lambda: BalancedDataParallelStrategy(gpu0_chunk=0)),
    "weights=1,3": (2, lambda: BalancedDataParallelStrategy(weights=[1, 3])),
    "micro-batches": (2, lambda: ModelParallelStrategy(num_microbatches=3)),
}
TWO: Any = {"batch_size_is": "global", "timeout_s": 60}
RANKS: dict[str, tuple[int, Any]] = {
    "ddp": (2, lambda: DDPStrategy(**TWO)),
    "weights": (2, lambda: BalancedDDPStrategy([1, 3], timeout_s=60)),
    "replicas": (4, lambda: DDPStrategy(devices_per_process=2, **TWO)),
    "stages": (4, lambda: DDPModelParallelStrategy(num_microbatches=2, **TWO)),
}


@pytest.mark.parametrize(("num", "batch_size"), [(9, 4), (11, 6)])
@pytest.mark.parametrize("plan", IN_ONE_PROCESS)
def test_chunks_log_what_one_device_logs(plan: str, num: int, batch_size: int) -> None:
    # A constant was taken for the number of samples of each chunk: ragged batches had other weights.
    devices, strategy = IN_ONE_PROCESS[plan]
    assert_same(fit(strategy(), devices, num, batch_size), on_one_device(num, batch_size))


def _fit_ranks(plan: str) -> Any:
    warnings.simplefilter("ignore")
    devices, strategy = RANKS[plan]
    return [fit(strategy(), devices, *sizes) for sizes in ((9, 4), (17, 8))]


@pytest.mark.parametrize("plan", RANKS)
def test_ranks_log_what_one_device_logs(plan: str) -> None:
    # A rank weighted its values by the constant, whatever its share of the batch: ragged batches counted too much. The
    # sum of a last batch of one sample, of which a rank with two devices had none, counted twice.
    for small, large in run_ranks(_fit_ranks, 2, plan):
        assert_same(small, on_one_device(9, 4))
        assert_same(large, on_one_device(17, 8))


class LogsPairs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (first,), (second,) = batch
        self.log("value", first.mean() + 100 * second.mean())


@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_batches_of_two_loaders_count_by_the_first_as_in_lightning(mode: Any) -> None:
    # 4, 4 and 1 samples beside 2, 2 and 1: 51.5, 255.5 and 408 were averaged by the smaller numbers
    loaders = [
        DataLoader(torch.utils.data.TensorDataset(torch.arange(float(num))[:, None]), batch_size=size)
        for num, size in ((9, 4), (5, 2))
    ]
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    (found,) = trainer.validate(LogsPairs(), CombinedLoader(loaders, mode), verbose=False)
    assert found["value"] == pytest.approx((4 * 51.5 + 4 * 255.5 + 408) / 9)


class LogsMedians(pl.LightningModule):
    """Logs what parts of a batch don't make, and needs the hook of the epoch's start."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.has_begun = False

    def on_validation_epoch_start(self) -> None:
        self.has_begun = True

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.has_begun
        self.log("median", batch.median().double(), batch_size=len(batch))


def _validate_medians(num_workers: int) -> float:
    warnings.simplefilter("ignore")
    strategy = DDPStrategy(batch_size_is="global", timeout_s=60)
    trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    loader: Any = DataLoader(range(8), 5, num_workers=num_workers)  # type: ignore[arg-type]
    return trainer.validate(LogsMedians(), loader, verbose=False)[0]["median"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_first_rank_evaluates_whole_batches_where_parts_do_not_make_what_is_logged(num_workers: int) -> None:
    # of 0 to 4 the median is 2, of 5 to 7 it is 6; workers had read the first batches in parts by then
    assert run_ranks(_validate_medians, 2, num_workers) == [pytest.approx((5 * 2 + 3 * 6) / 8)] * 2
