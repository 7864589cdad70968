"""Set environment variables of worker processes, and name the files that they leave."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager

PARENT = "EVENER_PARENT_PID"
"""Environment variable that holds the process id of a worker's parent."""

FAILURE_FILE = "failure.json"
"""The file of an attempt in which the first rank that fails says why."""

RUNNING_FILE, ENDED_FILE = "running{}", "ended{}"
"""The file of an attempt that is there while a rank runs; and what it is called once that has ended in order."""


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def importable() -> str:
    """This process's module search path, so that its children find the modules next to the user's `train.py`, too."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
