"""Every difference between the CPU and accelerators."""

from collections.abc import Sequence

import torch

from .exceptions import ConfigError

ACCELERATORS = {
    "auto": ("cuda", "mps", "cpu"),
    "gpu": ("cuda", "mps"),
    "cpu": ("cpu",),
    "cuda": ("cuda",),
    "mps": ("mps",),
}
"""What each word of `accelerator=` stands for, best first."""

ALLOWED = "Give a count (devices=2), indices (devices=[0,1]), names (devices=[cuda:0,cpu]) or devices=auto"


def accelerator_type(accelerator: str) -> str:
    """Resolve the word of `accelerator=` to a torch device type that exists on this machine.

    Args:
        accelerator: auto, cpu, gpu, cuda or mps.

    Returns:
        cpu, cuda or mps.

    Raises:
        ConfigError: the word is unknown, or this machine has no such device.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator not in ACCELERATORS:
        raise ConfigError(f"accelerator={accelerator} is unknown. Choose one of {', '.join(ACCELERATORS)}.")
    found = next((kind for kind in ACCELERATORS[accelerator] if present[kind]), None)
    if found is None:
        raise ConfigError(f"accelerator={accelerator}: this machine has no such device. Set accelerator=cpu or auto.")
    return found


def num_available(kind: str) -> int:
    """Count the devices of a type; the CPU counts as one, though it may be given any number of times."""
    return torch.cuda.device_count() if kind == "cuda" else 1


def resolve_devices(devices: int | str | Sequence[int | str], accelerator: str = "auto") -> list[torch.device]:
    """Name the devices that `devices=` and `accelerator=` mean on this machine.

    Args:
        devices: a count, `auto` (or -1) for all, a list of indices, or names; names may repeat and mix.
        accelerator: auto, cpu, gpu, cuda or mps; without effect on names.

    Returns:
        The devices of this machine, in order.

    Raises:
        ConfigError: no or negative devices, or more than the machine has.
    """
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        devices = [int(part) if part.isdigit() else part for part in devices.split(",")]
        devices = devices[0] if len(devices) == 1 and isinstance(devices[0], int) else devices
    if isinstance(devices, Sequence) and not isinstance(devices, str) and any(isinstance(d, str) for d in devices):
        return [_named_device(str(name)) for name in devices]
    kind = accelerator_type(accelerator)
    available = num_available(kind)
    if devices in ("auto", "-1", -1):
        return _indexed(kind, range(available))
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
        raise ConfigError(f"devices={indices}: no such devices of type {kind} here (it has {available}). {ALLOWED}.")
    return _indexed(kind, indices)


def _indexed(kind: str, indices: Sequence[int]) -> list[torch.device]:
    return [torch.device("cpu") if kind == "cpu" else torch.device(kind, index) for index in indices]


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"devices: {name!r} is no device. {ALLOWED}.") from exc
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"devices: {name} is not there; this machine has {torch.cuda.device_count()} of type cuda.")
    return device


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory that tensors took on a device, in bytes since the process started; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def precise_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device, for counts and weights that must add up exactly."""
    return torch.float32 if device.type == "mps" else torch.float64
