"""Log a run's facts in one block before its first step, with how its batch is cut, and a line for each epoch."""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from textwrap import indent
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from typing_extensions import override

from ...strategies.core.devices import device_model
from ...strategies.core.errors import draw_table
from ...strategies.pipeline.layout import StageLayout
from ...strategies.registry import layout_of, name_of, process_devices, processes_of, ranks_of
from ...strategies.replicas.layout import ReplicaLayout

log = logging.getLogger(__name__)


class StartUp(pl.Callback):
    """Log the facts of a run when training starts, and show the partition plan in TensorBoard's TEXT tab."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        devices = all_devices(trainer)
        rows = [(label, value) for label, value in start_up_rows(trainer, devices, self.run_dir) if value]
        width = max(len(label) for label, _ in rows)
        log.info("\n%s", "\n".join(f"  {label:<{width}}  {value}" for label, value in rows))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("partition", indent(partition_plan(trainer, devices), " " * 4))


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
        self._tell(trainer)
        self._since = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning computes the epoch's means after this hook
        self._ended = (trainer.current_epoch, time.perf_counter() - self._since)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell(trainer)

    def _tell(self, trainer: pl.Trainer) -> None:
        if self._ended is None:
            return
        epoch, seconds = self._ended
        self._ended = None
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
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = trainer.num_training_batches
        if math.isfinite(batches) and batches > 0:
            steps = math.ceil(batches / trainer.accumulate_grad_batches)
            interval: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it undeclared
            setattr(trainer, "log_every_n_steps", min(interval, steps))  # noqa: B010


def start_up_rows(trainer: pl.Trainer, devices: list[str], run_dir: str) -> list[tuple[str, str]]:
    """List the facts as (label, value); empty values are not shown.

    Args:
        devices: the devices of all processes.
    """
    strategy, machines = trainer.strategy, trainer.num_nodes
    counts = Counter(devices)
    parameters = list(trainer.lightning_module.parameters())
    total, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    frozen = f", {total - trained:,} of them frozen" if trained < total else ""
    return [
        ("strategy", name_of(strategy)),
        ("devices", ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())),
        ("processes", f"{processes_of(strategy)}" + (f" on {machines} machines" if machines > 1 else "")),
        ("global batch", batch_line(trainer)),
        ("precision", str(trainer.precision)),
        ("parameters", f"{total:,}{frozen}"),
        ("checkpoints", "; ".join(map(checkpoint_policy, trainer.checkpoint_callbacks)) or "none"),
        ("run directory", run_dir),
    ]


def checkpoint_policy(callback: Any) -> str:
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


def all_devices(trainer: pl.Trainer) -> list[str]:
    """Name the devices of all processes, assuming the same device types in every process."""
    own: list[torch.device] = process_devices(trainer.strategy)
    if (num := processes_of(trainer.strategy)) == 1:
        return list(map(_named, own))
    return [_named(torch.device(device.type)) for _ in range(num) for device in own]


def _named(device: torch.device) -> str:
    """`cpu`, or `cuda:1 (NVIDIA H200)`."""
    model = device_model(device)
    return str(device) if model == device.type else f"{device} ({model})"


def partition_plan(trainer: pl.Trainer, devices: list[str]) -> str:
    """Draw what each device does: the stages of the module, or the device's chunk of the batch."""
    layout = layout_of(trainer.strategy)
    sizes, _ = global_sizes(trainer)
    lines = [f"global batch {batch_line(trainer)}"] if sizes else []
    if layout is not None and (drawn := layout.describe()):
        return "\n".join([*lines, "", drawn])
    parts = [f"{size:,}" for size in sizes] if len(sizes) == len(devices) else [""] * len(devices)
    rows = zip(map(str, range(len(devices))), devices, parts, strict=True)
    return "\n".join([*lines, "", draw_table([("device", "", "samples"), *rows])])


def loader_batch_size(trainer: pl.Trainer) -> int | None:
    """Number of samples in a full batch of the first training loader; None if it is unknown."""
    combined = trainer.fit_loop._combined_loader
    loader: Any = combined.flattened[0] if combined is not None and combined.flattened else None
    sampler = getattr(loader, "batch_sampler", None)
    candidates = (getattr(owner, "batch_size", None) for owner in (loader, getattr(sampler, "units", None), sampler))
    return next((size for size in candidates if isinstance(size, int)), None)


def global_sizes(trainer: pl.Trainer) -> tuple[list[int], str]:
    """Cut a full batch as the strategy does.

    Returns:
        Samples per part, and the kind of part: `rank`, `replica`, or `device` if the batch is not cut. No sizes if the
        loader's batch size is unknown.
    """
    strategy, batch_size, world = trainer.strategy, loader_batch_size(trainer), trainer.world_size
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
    """Describe the global batch and how it is cut; empty if the loader's batch size is unknown."""
    sizes, part = global_sizes(trainer)
    if not sizes:
        return ""
    line = cut_line(sizes, part)
    layout = layout_of(trainer.strategy)
    if isinstance(layout, StageLayout) and layout.options.num_microbatches > 1:
        line += f", in {layout.options.num_microbatches} micro-batches"
    if (steps := trainer.accumulate_grad_batches) > 1:
        line += f"; an optimizer step takes {steps} of them, {steps * sum(sizes):,} samples"
    return line


def cut_line(sizes: Sequence[int], part: str) -> str:
    """Format samples per part: `64 samples`, `256 = 4 ranks × 64 samples`, `64 = 16 + 48 samples on 2 replicas`."""
    if len(sizes) == 1:
        return f"{sizes[0]:,} samples"
    if len(set(sizes)) == 1:
        return f"{sum(sizes):,} = {len(sizes)} {part}s × {sizes[0]:,} samples"
    return f"{sum(sizes):,} = {' + '.join(f'{size:,}' for size in sizes)} samples on {len(sizes)} {part}s"
