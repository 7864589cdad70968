"""Temporary directories that do not outlive a killed process for long: the next run removes what it left."""

import os
import shutil
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory() -> Generator[Path]:
    """Make a directory for the duration of the block, readable by this user alone."""
    prefix = f"evener-{socket.gethostname()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = left.name[len(prefix) :].partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
