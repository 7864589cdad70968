"""Explain out-of-memory errors: which device, how many samples, and what to change."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch

from ...strategies.batch.chunks import num_samples
from ...strategies.core.devices import is_out_of_memory
from ...strategies.core.private import of_lightning


class DeviceOutOfMemory(torch.OutOfMemoryError):
    """torch's error with the device, the number of samples and advice."""


@contextmanager
def explained_out_of_memory(trainer: pl.Trainer) -> Generator[None]:
    """Add device, chunk size, peak memory and advice to an out-of-memory error raised inside the block.

    Raises:
        DeviceOutOfMemory: instead of torch's or a library's error.
    """
    try:
        yield
    except RuntimeError as exc:
        if isinstance(exc, DeviceOutOfMemory) or not is_out_of_memory(exc):
            raise
        raise DeviceOutOfMemory(_explain(trainer, exc)) from exc


def _explain(trainer: pl.Trainer, exc: RuntimeError) -> str:
    text = str(exc)
    device, samples = trainer.strategy.root_device, _samples(trainer)
    if found := re.search(r"\bGPU (\d+)\b", text):
        device = torch.device("cuda", int(found[1]))
    if found := re.search(r"\[([^\[\]]+?),? on (\w+(?::\d+)?)\]$", text):  # a replica, named by the executor
        samples, device = found[1], torch.device(found[2])
    return (
        f"Out of memory on {device}, rank {trainer.global_rank}, in step {trainer.global_step}: {samples}, "
        f"{_peak(device)}. Make data.batch_size smaller and trainer.accumulate_grad_batches larger by the same factor, "
        "set precision=bf16-mixed, or use more devices; strategy=balanced_dp gives the first device less. "
        f"({text.splitlines()[0]})"
    )


def _samples(trainer: pl.Trainer) -> str:
    results: Any = of_lightning.results(trainer)
    count = None if results is None or results.batch is None else num_samples(results.batch)
    return "outside of a step" if count is None else f"{count} samples at once"


def _peak(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return "peak unknown"
    peak = torch.cuda.max_memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return f"peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB"
