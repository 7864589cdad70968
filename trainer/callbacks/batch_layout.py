"""Describe how a full training batch is cut among ranks or replicas: `256 = 4 ranks × 64 samples`."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from ...strategies.pipeline.layout import StageLayout
from ...strategies.registry import layout_of, ranks_of
from ...strategies.replicas.layout import ReplicaLayout


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
        return ranks.policy.sizes(batch_size, world), "rank"
    layout = layout_of(strategy)
    if isinstance(layout, ReplicaLayout):
        return layout.policy.sizes(batch_size, len(layout.blocks)), "replica"
    return [batch_size], "device"


def batch_line(trainer: pl.Trainer) -> str:
    """Describe the global batch and how it is cut; empty if the loader's batch size is unknown."""
    sizes, part = global_sizes(trainer)
    if not sizes:
        return ""
    line = cut_line(sizes, part)
    ranks, layout = ranks_of(trainer.strategy), layout_of(trainer.strategy)
    if len(sizes) > 1 and ranks is not None and ranks.batch_size_is == "per_device":
        line += f" (strategy.batch_size_is=global would cut the {sizes[0]:,} of one device)"
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
