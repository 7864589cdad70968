"""Hide the differences between the CPU and accelerators, and resolve `devices=` and `accelerator=` to them."""

import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import pytorch_lightning.strategies as pl_strategies
import torch
from pytorch_lightning.accelerators import AcceleratorRegistry
from torch import Tensor

from .errors import ConfigError

_OUT_OF_MEMORY = re.compile("CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|MPS backend out|DefaultCPUAllocator")


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an error says that a device's memory is exhausted: torch's own type, or a library's RuntimeError."""
    is_librarys = isinstance(exc, RuntimeError) and _OUT_OF_MEMORY.search(str(exc)) is not None
    return is_librarys or isinstance(exc, torch.OutOfMemoryError)


@cache
def has_streams(device: torch.device) -> bool:
    """Whether a device has streams, events and a count of its memory: every accelerator of this machine but MPS."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device.type not in ("cpu", "mps") and accelerator is not None and accelerator.type == device.type


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory allocated by tensors on a device, in bytes since the last reset; None where it is not counted."""
    return torch.accelerator.max_memory_allocated(device) if has_streams(device) else None


def device_model(device: torch.device) -> str:
    """Name the model of a device: `NVIDIA H200`; its type where that is not known."""
    named = None if device.type == "cpu" else getattr(torch.get_device_module(device.type), "get_device_name", None)
    return device.type if named is None else named(device)


def precise_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device, for counts and weights that must add up exactly."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_accelerator(device: torch.device) -> bool:
    """Whether work on a device runs asynchronously, on streams."""
    return device.type != "cpu"


def on_device(device: torch.device, stream: torch.Stream | None = None) -> AbstractContextManager[Any]:
    """Make a device and one of its streams current; does nothing for the CPU."""
    return _on_accelerator(device, stream) if is_accelerator(device) else nullcontext()


@contextmanager
def _on_accelerator(device: torch.device, stream: torch.Stream | None) -> Generator[None]:
    with torch.accelerator.device_index(device.index or 0), stream or nullcontext():
        yield


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that work on a device is queued on; None on the CPU."""
    return torch.accelerator.current_stream(device) if is_accelerator(device) else None


def time_mark(device: torch.device) -> float | torch.Event:
    """Mark a point in time: the host's clock for a CPU, an event after the queued work for an accelerator."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two marks of one device; waits for the second."""
    if isinstance(end, torch.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000
    return end - start


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor, asynchronously to streams only: elsewhere it could be read before the copy has finished."""
    return tensor.to(device, non_blocking=has_streams(device))


def scalar(value: float, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor of shape () from a number without waiting for the device, as `torch.tensor` would."""
    return torch.full((), value, device=device, dtype=dtype or torch.get_default_dtype())


def buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Group the indices of tensors by dtype, at most `bucket_bytes` per group."""
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        bucket, size = open_buckets.get(tensor.dtype, ([], 0))
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        open_buckets[tensor.dtype] = ([*bucket, i], size + tensor.nbytes)
    yield from (bucket for bucket, _ in open_buckets.values())


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as one row of bytes; of one element the strides may be anything."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


ALLOWED = "Give a count (devices=2), indices (devices=[0,1]), names (devices=[cuda:0,cpu]) or devices=auto"


def accelerator_type(accelerator: str) -> str:
    """Resolve `accelerator=` (auto, gpu, or a name in Lightning's registry) to a device type of this machine."""
    names = sorted(AcceleratorRegistry.available_accelerators())
    found = torch.accelerator.current_accelerator(check_available=True)
    present = None if found is None or found.type not in names else found.type
    if accelerator == "auto" or (accelerator == "gpu" and present is not None):
        return present or "cpu"
    registered: Any = AcceleratorRegistry[accelerator]["accelerator"] if accelerator in names else None
    if registered is not None and registered.is_available():
        return registered.get_parallel_devices(registered.parse_devices(1))[0].type
    if registered is None and accelerator != "gpu":
        raise ConfigError(f"accelerator={accelerator} is unknown. Choose one of auto, gpu, {', '.join(names)}.")
    raise ConfigError(f"accelerator={accelerator}: this machine has no such device. Set accelerator=cpu or auto.")


def num_available(kind: str) -> int:
    """Count the devices of a type; the CPU counts as one, although it may be listed any number of times."""
    return 1 if kind == "cpu" else torch.get_device_module(kind).device_count()


def resolve_devices(devices: int | str | Sequence[int | str], accelerator: str = "auto") -> list[torch.device]:
    """Resolve `devices=` (a count, `auto`, indices, or names, which may repeat and mix) and `accelerator=`."""
    given: Any = devices  # a configuration may hold anything
    if isinstance(given, str) and given not in ("auto", "-1"):
        words = given.split(",")
        given = int(given) if given.isdigit() else [int(word) if word.isdigit() else word for word in words]
    if isinstance(given, Sequence) and not isinstance(given, str) and any(isinstance(one, str) for one in given):
        names = [str(name) for name in given]
        named = {name: _named_device(name) for name in sorted(names, key=str.isdigit)}  # it says which one is none
        return [named[name] for name in names]
    kind = accelerator_type(accelerator)
    available = num_available(kind)
    if given in ("auto", "-1", -1):
        given = available
    is_count = isinstance(given, int) and not isinstance(given, bool)
    if not is_count and not isinstance(given, Sequence):
        raise ConfigError(f"devices must be a count, a list or 'auto'; got {given!r}. {ALLOWED}.")
    listed: Any = range(given) if isinstance(given, int) else given
    indices = [int(index) for index in listed]
    if not indices:
        raise ConfigError(f"devices={given}: at least one device is needed. {ALLOWED}.")
    if kind == "cpu" and not is_count:
        raise ConfigError(f"devices={given}: the CPU has no indices. {ALLOWED}.")
    if kind != "cpu" and any(not 0 <= index < available for index in indices):
        raise ConfigError(f"devices={given}: this machine has {available} of type {kind}. {ALLOWED}.")
    return [torch.device("cpu") if kind == "cpu" else torch.device(kind, index) for index in indices]


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"devices: {name!r} is not a device. {ALLOWED}.") from exc
    if device.type == "cpu":
        return device
    device = torch.device(device.type, device.index or 0)  # where tensors of `cuda` or `mps` are
    if device.index >= (available := num_available(device.type)):
        raise ConfigError(f"devices: {name} does not exist; this machine has {available} of type {device.type}.")
    return device


def give_devices(strategy: Any, devices: Any) -> dict[str, Any]:
    """Set a strategy's devices if they are given by name, and return the arguments that Lightning's trainer takes."""
    if isinstance(devices, str) and devices != "auto" and re.search("[a-z]", devices):  # of LightningCLI
        devices = [name.strip(" '\"") for name in devices.strip(" []").split(",")]
    names = [str(one) for one in devices] if isinstance(devices, (list, tuple)) else []
    if not any(re.search("[a-z]", name) for name in names):
        return {}
    if not hasattr(strategy, "parallel_devices") or isinstance(strategy, pl_strategies.ParallelStrategy):
        raise ConfigError(
            f"devices={names}: only single-process strategies accept device names. Give a count or indices, or "
            "choose strategy=dp, balanced_dp, model_parallel or single_device."
        )
    strategy.parallel_devices = resolve_devices(names)
    root = strategy.parallel_devices[0]
    return {"accelerator": root.type, "devices": [root.index or 0] if is_accelerator(root) else 1}
