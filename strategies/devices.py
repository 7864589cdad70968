"""Every difference between the CPU and accelerators."""

import math
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning.strategies as pl_strategies
import torch
from torch import Tensor

from .exceptions import ConfigError

ACCELERATORS = {
    "auto": ("cuda", "mps", "cpu"),
    "gpu": ("cuda", "mps"),
    "cpu": ("cpu",),
    "cuda": ("cuda",),
    "mps": ("mps",),
}
"""What each word of `accelerator=` stands for, best first."""

_NAME = re.compile(r"[a-z]+:?\d*")  # misspelt ones, too, which are named where they are refused

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
    countable: Any = devices  # from a configuration it may be anything
    if not isinstance(countable, (int, Sequence)):
        raise ConfigError(f"devices={devices} is no count. {ALLOWED}.")
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
    """Peak memory that tensors took on a device, in bytes since the last reset; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak_memory_bytes(device: torch.device) -> None:
    """Count the peak memory of a device from now on; the CPU has none of its own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_name(device: torch.device) -> str:
    """Name a device for people: `cpu`, or `cuda:1 (NVIDIA H200)`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def precise_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device, for counts and weights that must add up exactly."""
    return torch.float32 if device.type == "mps" else torch.float64


def give_devices(strategy: Any, devices: Any) -> dict[str, Any]:
    """Give a strategy the devices that Lightning's trainer has no words for: names, which may repeat and mix.

    Args:
        strategy: a strategy object of one process.
        devices: the trainer's `devices=`, a list of names (`["cuda:0", "cpu"]`).

    Returns:
        The arguments for Lightning's trainer: its `devices` and `accelerator` are those of the first device.

    Raises:
        ConfigError: the strategy can't be given devices, or one is not there.
    """
    if not hasattr(strategy, "parallel_devices") or isinstance(strategy, pl_strategies.ParallelStrategy):
        raise ConfigError(
            f"devices={list(devices)}: names are for strategies of one process. Give a count or indices, or choose "
            "strategy=dp, balanced_dp, model_parallel or single_device."
        )
    strategy.parallel_devices = resolve_devices([str(device) for device in devices])
    root = strategy.parallel_devices[0]
    return {"accelerator": root.type, "devices": [root.index or 0] if is_accelerator(root) else 1}


def are_names(devices: Any) -> bool:
    """Whether `devices=` lists devices by name, such as `cpu` or `cuda:0`."""
    return isinstance(devices, (list, tuple)) and any(_is_name(device) for device in devices)


def _is_name(device: Any) -> bool:
    return isinstance(device, torch.device) or (isinstance(device, str) and _NAME.fullmatch(device) is not None)


def is_accelerator(device: torch.device) -> bool:
    """Whether work on a device runs asynchronously, on streams."""
    return device.type != "cpu"


@contextmanager
def on_device(device: torch.device, stream: torch.Stream | None = None) -> Generator[None]:
    """Make a device, and a stream of it, the current ones; the CPU has neither."""
    if not is_accelerator(device):
        yield
        return
    with torch.accelerator.device_index(device.index or 0), stream or nullcontext():
        yield


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that work on a device is queued on; None on the CPU."""
    return torch.accelerator.current_stream(device) if is_accelerator(device) else None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor, without waiting for it where that is safe: to the CPU a copy must have ended before it is read."""
    return tensor.to(device, non_blocking=is_accelerator(device))


def copy_coalesced(sources: Sequence[Tensor], targets: Sequence[Tensor], bucket_bytes: int = 2**26) -> None:
    """Copy tensors to tensors of the same shapes on another device, in few transfers.

    Between unequal devices the sources are packed into flat buckets, one transfer each; on one device one fused copy
    does it. Call it under `torch.no_grad()`.

    Args:
        sources: tensors of one device.
        targets: tensors of one device, in the same order.
        bucket_bytes: bytes of a bucket at most (one larger tensor is a bucket of its own).
    """
    if not sources:
        return
    if sources[0].device == targets[0].device:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for bucket in _buckets(sources, bucket_bytes):
        moved = move_coalesced([sources[i] for i in bucket], targets[0].device)
        torch._foreach_copy_([targets[i] for i in bucket], moved)


def move_coalesced(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move tensors of one dtype to a device in one transfer.

    Returns:
        Views of one flat tensor on the device, with the shapes of `tensors`.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = flat.to(device, non_blocking=is_accelerator(device))  # to the CPU the copy must have ended before it is read
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Indices of tensors by dtype, in groups of at most `bucket_bytes`."""
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        bucket, size = open_buckets.get(tensor.dtype, ([], 0))
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        open_buckets[tensor.dtype] = ([*bucket, i], size + tensor.nbytes)
    yield from (bucket for bucket, _ in open_buckets.values())


def memory_bytes(device: torch.device) -> float:
    """Bytes of memory that a device has; infinite for the CPU, whose memory is shared with everything else."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else math.inf
