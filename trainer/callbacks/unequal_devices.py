"""Hint at the balanced strategies where devices differ."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import pytorch_lightning as pl

from ...strategies.core.devices import device_model, is_accelerator, memory_bytes
from ...strategies.registry import name_of, process_devices
from .device_monitor import gather

BALANCED = {
    "dp": "strategy=balanced_dp strategy.weights=auto",
    "ddp": "strategy=balanced_ddp",
    "ddp_model_parallel": "strategy=balanced_ddp_model_parallel",
}
"""What to set in the place of a strategy that gives all devices the same share."""

ALIKE = 1.1
"""Ratio of memories up to which devices of one model count as equal: what a driver reserves differs."""


class DeviceFacts(NamedTuple):
    """What can be told of a device before it has done anything: a number for its model, and its memory in bytes."""

    model: float
    memory: float


def all_device_facts(trainer: pl.Trainer) -> list[DeviceFacts]:
    """Gather the facts of all devices of all processes; every rank must call it, at the start of training.

    The processes of one machine have its CPU in common: then a process's own facts are all.
    """
    devices = process_devices(trainer.strategy)
    own = [DeviceFacts(float(zlib.crc32(device_model(device).encode())), memory_bytes(device)) for device in devices]
    if trainer.world_size == 1 or (trainer.num_nodes == 1 and not any(map(is_accelerator, devices))):
        return own
    found = gather(trainer.strategy, [number for facts in own for number in facts])
    return [DeviceFacts(*pair) for pair in zip(found[0::2], found[1::2], strict=True)]


def hint(trainer: pl.Trainer, devices: Sequence[DeviceFacts]) -> str:
    """Say which strategy suits devices that differ; empty if they are equal, or the strategy balances already."""
    instead = BALANCED.get(name_of(trainer.strategy))
    memories = [facts.memory for facts in devices]
    if instead is None or not memories:
        return ""
    differ = ["models"] if len({facts.model for facts in devices}) > 1 else []
    if max(memories) > ALIKE * min(memories):
        differ.append("memory")
    return f"devices differ in {' and '.join(differ)}: {instead} gives each its share" if differ else ""
