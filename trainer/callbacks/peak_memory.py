"""Read and reset the peak resident size of this process."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def peak_resident_bytes() -> int:
    """Peak resident size in bytes, since the last reset if the system supports resets (Linux)."""
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident() -> None:
    """Reset the peak if the system supports it (Linux: proc_pid_clear_refs(5), value 5)."""
    with suppress(OSError):
        CLEAR.write_text("5")
