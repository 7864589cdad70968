"""Memory on late devices: what dp leaves on the root, what waits on the host, and what is planned."""

import gc
import warnings
from pathlib import Path
from typing import Any

import late_device
import pytorch_lightning as pl
import torch
from late_device import needs_late_device
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar
from regression import quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import compose, train
from evener.trainer.cli.train import prepare
from evener.trainer.plan.plan import plan_memory

pytestmark = needs_late_device

WIDTH, DEPTH = 64, 8
BYTES = DEPTH * WIDTH * WIDTH * 4
TWO = ["late:0", "late:1"]


ROWS: dict[str, list[float]] = {}
"""Of each device the samples that steps have seen, in this process: lists of the module are those of batches."""


class Wide(pl.LightningModule):
    """Notes the devices of batches that a step gets, and the samples behind what it has of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        self.rows = dict[str, list[float]]()
        self.seen: list[str] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        torch.accelerator.synchronize("late:0")
        torch.accelerator.reset_peak_memory_stats("late:0")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        ROWS.setdefault(str(x.device), []).append(x.untyped_storage().nbytes() / WIDTH / 4)
        return self.net(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fitted(strategy: Any, num: int, size: int, **options: Any) -> Wide:
    gc.collect()  # what earlier runs in this process have left
    module, loader = Wide(), DataLoader(TensorDataset(torch.randn(num, WIDTH)), size)
    ROWS.clear()
    quiet_trainer(strategy, accelerator="late", max_epochs=1, **options).fit(module, loader)
    module.rows = dict(ROWS)
    return module


def _root_peaks() -> list[float]:
    found = []
    for num in (3, 4):
        fitted(DataParallelStrategy([f"late:{i}" for i in range(num)]), 8 * num, 4 * num)
        found.append(torch.accelerator.max_memory_allocated("late:0") / BYTES)
    return found


def test_the_roots_peak_under_dp_does_not_depend_on_the_number_of_replicas() -> None:
    # the lower one of two runs: on a busy machine two gradients may be on their way at once
    peaks = [min(pair) for pair in zip(late_device.run(_root_peaks), late_device.run(_root_peaks), strict=True)]
    # parameters, gradients, the sum of the others', and one replica's on its way; activations of 4 samples. On a busy
    # machine some are gone before others come
    assert min(peaks) > 2.0
    assert max(peaks) < 4.1


class Sees(pl.Callback):
    """Receives every batch, on the root device."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.seen.append(str(batch[0].device))


WAITING: dict[str, tuple[Any, str, list[int]]] = {
    "dp": (lambda: DataParallelStrategy(TWO), "late:0", [32]),
    "balanced_dp": (lambda: BalancedDataParallelStrategy(gpu0_chunk=0, devices=TWO), "late:1", [64]),
    "micro-batches": (lambda: ModelParallelStrategy(TWO, num_microbatches=4), "late:1", [16] * 4),
}
"""Strategies, a device, and the samples of a batch of 64 that a step gets there."""


def _batches(folder: str) -> Any:
    found = {}
    for name, (strategy, device, sizes) in WAITING.items():
        for sees in (False, True):
            shown = [ModelCheckpoint(folder), TQDMProgressBar(), *([Sees()] if sees else [])]
            options: Any = {"callbacks": shown, "enable_checkpointing": True, "enable_progress_bar": True}
            module = fitted(strategy(), 64, 64, **options)
            looks = len(module.rows[device]) - len(sizes)
            rows = module.rows[device]
            found[name, sees] = rows[looks:], max(rows[:looks], default=0), module.seen
    return found


def test_a_batch_waits_on_the_host_unless_a_hook_receives_it(tmp_path: Path) -> None:
    for (name, sees), (rows, looked_at, seen) in late_device.run(_batches, str(tmp_path)).items():
        _, device, sizes = WAITING[name]
        assert seen == ([device if name == "micro-batches" else "late:0"] if sees else [])
        assert sees or rows == sizes, name
        assert looked_at <= 8  # samples that are looked at before the first step


class Masked(pl.LightningModule):
    """Samples whose activations are as large as all parameters; the loss divides by what counts of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, mask = batch
        return (self.net(x).square().mean(-1) * mask).sum() / mask.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=10.0)


def _masked() -> float:
    torch.manual_seed(0)
    mask = torch.arange(WIDTH) < torch.tensor([60, 1, 5, 2] * 4).unsqueeze(1)
    loader = DataLoader(TensorDataset(torch.randn(16, WIDTH, WIDTH), mask.float()), 4)
    late_device.set_limit(16 * BYTES)
    parted, one = Masked(), Masked()
    quiet_trainer(DataParallelStrategy(TWO), accelerator="late", max_epochs=1).fit(parted, loader)
    quiet_trainer(SingleDeviceStrategy(), max_epochs=1).fit(one, loader)
    return float((weights(parted.cpu()) - weights(one)).abs().max())


def test_fewer_samples_are_looked_at_before_the_first_step_where_eight_do_not_fit() -> None:
    # Failed before: what the loss divides by was not found, for which a line of the log gave the lack of memory, and
    # the run went on with losses that counted by samples: weights differed by 0.02.
    assert late_device.run(_masked) < 1e-5


DIGITS = ["experiment=digits", "accelerator=late", "logger=none", "callbacks=none", "test_after_fit=false"]
STAGES = ["strategy=model_parallel", "devices=2", "strategy.num_microbatches=4"]
PLANNED = {
    "dp": (["strategy=dp", "devices=2"], 0.05),  # which thread is first decides what is freed when
    "balanced_dp": (["strategy=balanced_dp", "devices=2", "strategy.weights=[1,2]"], 0.05),
    "1f1b": (STAGES, 0.11),
    "gpipe": ([*STAGES, "strategy.schedule=gpipe"], 0.1),
}


def _planned(folder: str) -> dict[str, list[float]]:
    """Planned / measured - 1, by device."""
    warnings.simplefilter("ignore")
    found: dict[str, list[float]] = {}
    for name, (words, _) in PLANNED.items():
        words = [*DIGITS, *words, "data.batch_size=400", "checkpoint=none", "monitor=null", "++trainer.max_steps=6"]
        plan = plan_memory(prepare(compose([*words, f"run_dir={folder}/plan of {name}"])))
        gc.collect()
        peaks = train(compose([*words, f"run_dir={folder}/{name}", "+trainer.limit_val_batches=0"])).peak_memory_mib
        found[name] = [d.peak / (peak * 2**20) - 1 for d, peak in zip(plan.devices, peaks, strict=True)]
    return found


def test_peaks_are_within_a_tenth_of_the_plan(tmp_path: Path) -> None:
    for name, errors in late_device.run(_planned, str(tmp_path)).items():
        assert max(map(abs, errors)) < PLANNED[name][1], (name, errors)
