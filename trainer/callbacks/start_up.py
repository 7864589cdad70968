"""Log a run's facts in one block before its first step, with how its batch is cut, and a line for each epoch."""

import logging
import math
import time
from collections import Counter
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from typing_extensions import override

from ...strategies.core.devices import device_model
from ...strategies.pipeline.layout import StageLayout
from ...strategies.registry import layout_of, name_of, process_devices, processes_of, ranks_of
from ...strategies.replicas.layout import ReplicaLayout

log = logging.getLogger(__name__)


class StartUp(pl.Callback):
    """Log the facts of a run when training starts."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        devices, num, machines = _all_devices(trainer), processes_of(trainer.strategy), trainer.num_nodes
        parameters = list(pl_module.parameters())
        total, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
        counts, kept = Counter(devices).items(), [_kept(callback) for callback in trainer.checkpoint_callbacks]
        rows = {
            "strategy": name_of(trainer.strategy),
            "devices": ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts),
            "processes": f"{num}" + (f" on {machines} machines" if machines > 1 else ""),
            "global batch": batch_line(trainer),
            "precision": str(trainer.precision),
            "parameters": f"{total:,}" + (f", {total - trained:,} of them frozen" if trained < total else ""),
            "checkpoints": "; ".join(kept) or "none",
            "run directory": self.run_dir,
        }
        log.info("\n%s", "\n".join(f"  {label:<13}  {value}" for label, value in rows.items() if value))


class EpochLines(pl.Callback):
    """Log a line after every epoch: its seconds, the steps so far, and the progress bar's metrics.

    Epochs count from 0, as in the progress bar, the names of checkpoints and the metric `epoch`.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._ended: tuple[int, float] | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()  # of an epoch that was begun before the run was interrupted

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_end(trainer, pl_module)
        self._since = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning computes the epoch's means after this hook
        self._ended = (trainer.current_epoch, time.perf_counter() - self._since)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._ended is None:
            return
        (epoch, seconds), self._ended = self._ended, None
        metrics = trainer.progress_bar_metrics or {
            name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1
        }
        shown = [f"{name} {value:.4g}" for name, value in metrics.items()]
        of = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        log.info(" · ".join([f"epoch {epoch}{of}", f"step {trainer.global_step}", f"{seconds:.1f} s", *shown]))


class LogEveryEpoch(pl.Callback):
    """Shorten `log_every_n_steps` to the number of optimizer steps in an epoch, if an epoch has fewer.

    Lightning logs nothing if training is shorter than the interval, and the curves stay empty.
    """

    @override
    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if math.isfinite(batches := trainer.num_training_batches) and batches > 0:
            steps = math.ceil(batches / trainer.accumulate_grad_batches)
            trainer.log_every_n_steps = min(trainer.log_every_n_steps, steps)


def _kept(callback: Any) -> str:
    """Describe which checkpoints are kept, and when they are written: `the last, every 1,000 steps`."""
    if not isinstance(callback, ModelCheckpoint):
        return type(callback).__name__
    top_k, interval, kept = callback.save_top_k, callback._train_time_interval, list[str]()
    if top_k:
        best, by = ("the best", f" by {callback.monitor} ({callback.mode})") if callback.monitor else ("the newest", "")
        kept.append(("all" if top_k < 0 else best if top_k == 1 else f"{best} {top_k}") + by)
    if callback.save_last:
        kept.append("the last")
    steps = callback._every_n_train_steps
    number, unit = (steps, "step") if steps else (callback._every_n_epochs, "epoch")
    every = unit if number == 1 else f"{number:,} {unit}s"
    if interval is not None:
        every = f"{interval.total_seconds():,.0f} s"
    return f"{' and '.join(kept) or 'none'}, every {every}"


def _all_devices(trainer: pl.Trainer) -> list[str]:
    """Name the devices of all processes, assuming the same device types in every process: `cuda:1 (NVIDIA H200)`."""
    own: list[torch.device] = process_devices(trainer.strategy)
    if (num := processes_of(trainer.strategy)) > 1:
        own = [torch.device(device.type) for device in own] * num
    models = map(device_model, own)
    return [str(d) if model == d.type else f"{d} ({model})" for d, model in zip(own, models, strict=True)]


def global_sizes(trainer: pl.Trainer) -> tuple[list[int], str]:
    """Cut a full batch as the strategy does.

    Returns:
        Samples per part, and the kind of part: `rank`, `replica`, or `device` if the batch is not cut. No sizes if the
        batch size of the first training loader is unknown.
    """
    strategy, world, combined = trainer.strategy, trainer.world_size, trainer.fit_loop._combined_loader
    loader: Any = combined.flattened[0] if combined is not None and combined.flattened else None
    sampler = getattr(loader, "batch_sampler", None)
    given = (getattr(owner, "batch_size", None) for owner in (loader, getattr(sampler, "units", None), sampler))
    batch_size = next((size for size in given if isinstance(size, int)), None)
    if batch_size is None:
        return [], "device"
    if world > 1:
        ranks = ranks_of(strategy)
        if ranks is None or ranks.batch_size_is == "per_device":
            return [batch_size] * world, "rank"
        return ranks.balance.policy.sizes(batch_size, world), "rank"
    layout = layout_of(strategy)
    if isinstance(layout, ReplicaLayout):
        return layout.policy.sizes(batch_size, layout.num_parts), "replica"
    return [batch_size], "device"


def batch_line(trainer: pl.Trainer) -> str:
    """Describe the global batch and how it is cut; empty if the loader's batch size is unknown.

    `64 samples`, `256 = 4 ranks × 64 samples`, or `64 = 16 + 48 samples on 2 replicas`.
    """
    sizes, part = global_sizes(trainer)
    if not sizes:
        return ""
    num, total, layout = len(sizes), sum(sizes), layout_of(trainer.strategy)
    if num == 1:
        line = f"{total:,} samples"
    elif len(set(sizes)) == 1:
        line = f"{total:,} = {num} {part}s × {sizes[0]:,} samples"
    else:
        line = f"{total:,} = {' + '.join(f'{size:,}' for size in sizes)} samples on {num} {part}s"
    if isinstance(layout, StageLayout) and layout.options.num_microbatches > 1:
        line += f", in {layout.options.num_microbatches} micro-batches"
    if (steps := trainer.accumulate_grad_batches) > 1:
        line += f"; an optimizer step takes {steps} of them, {steps * total:,} samples"
    return line
