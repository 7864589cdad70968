"""Resolve `devices=` and `accelerator=` to the devices of this machine."""

import re
from collections.abc import Sequence
from typing import Any

import pytorch_lightning.strategies as pl_strategies
import torch

from .devices import is_accelerator
from .errors import ConfigError

ACCELERATORS = {
    "auto": ("cuda", "mps", "cpu"),
    "gpu": ("cuda", "mps"),
    "cpu": ("cpu",),
    "cuda": ("cuda",),
    "mps": ("mps",),
}
"""Device types that each value of `accelerator=` may resolve to, in order of preference."""

_NAME = re.compile(r"[a-z]+:?\d*")  # misspelt names match too, so that the error can quote them

ALLOWED = "Give a count (devices=2), indices (devices=[0,1]), names (devices=[cuda:0,cpu]) or devices=auto"


def accelerator_type(accelerator: str) -> str:
    """Resolve `accelerator=` to a torch device type that exists on this machine.

    Args:
        accelerator: auto, cpu, gpu, cuda or mps.

    Returns:
        cpu, cuda or mps.

    Raises:
        ConfigError: the accelerator is unknown, or this machine has none.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator not in ACCELERATORS:
        raise ConfigError(f"accelerator={accelerator} is unknown. Choose one of {', '.join(ACCELERATORS)}.")
    found = next((kind for kind in ACCELERATORS[accelerator] if present[kind]), None)
    if found is None:
        raise ConfigError(f"accelerator={accelerator}: this machine has no such device. Set accelerator=cpu or auto.")
    return found


def num_available(kind: str) -> int:
    """Count the devices of a type; the CPU counts as one, although it may be listed any number of times."""
    return torch.cuda.device_count() if kind == "cuda" else 1


def resolve_devices(devices: int | str | Sequence[int | str], accelerator: str = "auto") -> list[torch.device]:
    """Resolve `devices=` and `accelerator=` to devices of this machine.

    Args:
        devices: a count, `auto` (or -1) for all, a list of indices, or names; names may repeat and mix.
        accelerator: auto, cpu, gpu, cuda or mps; ignored for names.

    Returns:
        The devices of this machine, in order.

    Raises:
        ConfigError: the count is not positive, or a device does not exist on this machine.
    """
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        devices = [int(part) if part.isdigit() else part for part in devices.split(",")]
        devices = devices[0] if len(devices) == 1 and isinstance(devices[0], int) else devices
    if isinstance(devices, Sequence) and not isinstance(devices, str) and any(isinstance(d, str) for d in devices):
        return _named_devices([str(name) for name in devices])
    kind = accelerator_type(accelerator)
    available = num_available(kind)
    if devices in ("auto", "-1", -1):
        return _indexed(kind, range(available))
    countable: Any = devices  # a configuration may hold anything
    if not isinstance(countable, (int, Sequence)):
        raise ConfigError(f"devices must be a count, a list or 'auto'; got {devices!r}. {ALLOWED}.")
    if isinstance(devices, bool) or (isinstance(devices, int) and devices < 1):
        raise ConfigError(f"devices={devices}: at least one device is needed. {ALLOWED}.")
    if isinstance(devices, int):
        if devices > available and kind != "cpu":
            raise ConfigError(
                f"devices={devices}: this machine has {available} of type {kind}. Give at most {available}."
            )
        return _indexed(kind, range(devices))
    indices = [int(index) for index in devices]
    if not indices or kind == "cpu" or any(not 0 <= index < available for index in indices):
        raise ConfigError(
            f"devices={indices}: expected indices of accelerators; this machine has {available} of type {kind}. "
            f"{ALLOWED}."
        )
    return _indexed(kind, indices)


def _indexed(kind: str, indices: Sequence[int]) -> list[torch.device]:
    return [torch.device("cpu") if kind == "cpu" else torch.device(kind, index) for index in indices]


def _named_devices(names: list[str]) -> list[torch.device]:
    indices = [name for name in names if name.isdigit()]
    named = [_named_device(name) for name in names if name not in indices]  # first: it says which one is not a device
    if indices:
        raise ConfigError(f"devices=[{','.join(names)}] has indices and names. Give names only, such as cuda:0.")
    return named


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"devices: {name!r} is not a device. {ALLOWED}.") from exc
    if device.type != "cpu" and ":" not in str(device):
        device = torch.device(device.type, 0)  # where tensors of `cuda` or `mps` are
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"devices: {name} does not exist; this machine has {torch.cuda.device_count()} of type cuda.")
    return device


def give_devices(strategy: Any, devices: Any) -> dict[str, Any]:
    """Set a strategy's devices by name, which Lightning's trainer does not support; names may repeat and mix.

    Args:
        strategy: a single-process strategy.
        devices: the trainer's `devices=`, a list of names (`["cuda:0", "cpu"]`).

    Returns:
        Arguments for Lightning's trainer: `devices` and `accelerator` of the first device.

    Raises:
        ConfigError: the strategy does not accept device names, or a device does not exist.
    """
    if not hasattr(strategy, "parallel_devices") or isinstance(strategy, pl_strategies.ParallelStrategy):
        raise ConfigError(
            f"devices={list(devices)}: only single-process strategies accept device names. Give a count or indices, or "
            "choose strategy=dp, balanced_dp, model_parallel or single_device."
        )
    strategy.parallel_devices = resolve_devices([str(device) for device in devices])
    root = strategy.parallel_devices[0]
    return {"accelerator": root.type, "devices": [root.index or 0] if is_accelerator(root) else 1}


def listed(devices: Any) -> Any:
    """`devices=` as a list where it is the text of a list of names, as LightningCLI gives it."""
    if not isinstance(devices, str) or devices == "auto" or not re.search("[a-z]", devices):
        return devices
    return [name.strip(" '\"") for name in devices.strip(" []").split(",")]


def are_names(devices: Any) -> bool:
    """Whether `devices=` lists devices by name, such as `cpu` or `cuda:0`."""
    return isinstance(devices, (list, tuple)) and any(
        isinstance(device, torch.device) or (isinstance(device, str) and _NAME.fullmatch(device)) for device in devices
    )
