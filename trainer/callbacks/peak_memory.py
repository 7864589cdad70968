"""Read and reset the peak memory of devices; that of the CPU is the resident size of this process."""

import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from ...strategies.core.devices import peak_memory_bytes, reset_peak_memory_bytes

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def peak_bytes(device: torch.device) -> int:
    """Peak memory of a device in bytes; for the CPU the largest resident size of this process."""
    measured = peak_memory_bytes(device)
    return peak_resident_bytes() if measured is None else measured


def peak_resident_bytes() -> int:
    """Peak resident size in bytes, since the last reset if the system supports resets (Linux)."""
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peaks(devices: Iterable[torch.device]) -> None:
    """Reset the peaks, which may stem from an earlier run in this process, such as another job of a sweep.

    That of the CPU is reset if the system supports it (Linux: proc_pid_clear_refs(5), value 5).
    """
    for device in devices:
        reset_peak_memory_bytes(device)
    with suppress(OSError):
        CLEAR.write_text("5")
