"""Resolve `devices=` and `accelerator=` to the devices of this machine."""

import re
from collections.abc import Sequence
from typing import Any

import pytorch_lightning.strategies as pl_strategies
import torch
from pytorch_lightning.accelerators import AcceleratorRegistry

from .devices import is_accelerator
from .errors import ConfigError

_NAME = re.compile(r"[a-z]+:?\d*")  # misspelt names match too, so that the error can quote them

ALLOWED = "Give a count (devices=2), indices (devices=[0,1]), names (devices=[cuda:0,cpu]) or devices=auto"


def accelerator_type(accelerator: str) -> str:
    """Resolve `accelerator=` to a torch device type that exists on this machine.

    Args:
        accelerator: auto, gpu (this machine's accelerator), or a name in Lightning's registry: cpu, cuda, mps, or what
            another package has registered.

    Raises:
        ConfigError: the accelerator is unknown, or this machine has none.
    """
    names = sorted(AcceleratorRegistry.available_accelerators())
    if accelerator not in ("auto", "gpu", *names):
        raise ConfigError(f"accelerator={accelerator} is unknown. Choose one of auto, gpu, {', '.join(names)}.")
    found = torch.accelerator.current_accelerator(check_available=True)
    present = None if found is None or found.type not in names else found.type
    if accelerator == "auto":
        return present or "cpu"
    registered: Any = None if accelerator == "gpu" else AcceleratorRegistry[accelerator]["accelerator"]
    if registered is not None and registered.is_available():
        return registered.get_parallel_devices(registered.parse_devices(1))[0].type
    if registered is not None or present is None:
        raise ConfigError(f"accelerator={accelerator}: this machine has no such device. Set accelerator=cpu or auto.")
    return present


def for_lightning(accelerator: Any) -> Any:
    """`accelerator=` as Lightning takes it, whose `auto` and `gpu` choose among its own accelerators only."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type in ("cuda", "mps"):  # Lightning says what there is, or that there is none
        return accelerator
    return accelerator_type(accelerator) if accelerator in ("auto", "gpu") else accelerator


def num_available(kind: str) -> int:
    """Count the devices of a type; the CPU counts as one, although it may be listed any number of times."""
    return 1 if kind == "cpu" else torch.get_device_module(kind).device_count()


def resolve_devices(devices: int | str | Sequence[int | str], accelerator: str = "auto") -> list[torch.device]:
    """Resolve `devices=` and `accelerator=` to devices of this machine.

    Args:
        devices: a count, `auto` (or -1) for all, a list of indices, or names; names may repeat and mix.
        accelerator: see `accelerator_type`; ignored for names.

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
    if kind == "cpu" and indices:
        names = ",".join(["cpu"] * len(indices))
        raise ConfigError(
            f"devices={indices}: the CPU has no indices. Give a count (devices={len(indices)}) or names "
            f"(devices=[{names}])."
        )
    if not indices or any(not 0 <= index < available for index in indices):
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
    if device.type != "cpu" and (device.index or 0) >= (available := num_available(device.type)):
        raise ConfigError(f"devices: {name} does not exist; this machine has {available} of type {device.type}.")
    return device


def give_devices(strategy: Any, devices: Any) -> dict[str, Any]:
    """Set a strategy's devices if they are given by name, which Lightning's trainer does not support.

    Args:
        strategy: a single-process strategy.
        devices: the trainer's `devices=`. Names (`["cuda:0", "cpu"]`) may repeat and mix; LightningCLI gives text.

    Returns:
        Arguments for Lightning's trainer: `devices` and `accelerator` of the first device; none without names.

    Raises:
        ConfigError: the strategy does not accept device names, or a device does not exist.
    """
    if isinstance(devices, str) and devices != "auto" and re.search("[a-z]", devices):
        devices = [name.strip(" '\"") for name in devices.strip(" []").split(",")]
    names = [str(one) for one in devices] if isinstance(devices, (list, tuple)) else []
    if not any(map(_NAME.fullmatch, names)):
        return {}
    if not hasattr(strategy, "parallel_devices") or isinstance(strategy, pl_strategies.ParallelStrategy):
        raise ConfigError(
            f"devices={names}: only single-process strategies accept device names. Give a count or indices, or "
            "choose strategy=dp, balanced_dp, model_parallel or single_device."
        )
    strategy.parallel_devices = resolve_devices(names)
    root = strategy.parallel_devices[0]
    return {"accelerator": root.type, "devices": [root.index or 0] if is_accelerator(root) else 1}
