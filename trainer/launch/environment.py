"""Set environment variables of worker processes, and report their failures."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager

AGENT = "EVENER_AGENT_PID"
"""Environment variable that holds the process id of a worker's parent."""


FAILURE_FILE = "failure{}.json"
"""The file beside a worker's configuration in which the first rank that fails says why; with the attempt's number."""

STOPPED_FILE = "stopped"
"""The file beside a worker's configuration that says that rank 0 was stopped by a signal, and has ended in order."""


class WorkerError(RuntimeError):
    """A worker failed; the message contains its rank and the reason.

    Args:
        message: rank, frames of the user's code, and reason.
        trace: the worker's whole traceback; empty if it left none.
        rank: the worker's; None if no worker is at fault.
    """

    def __init__(self, message: str, trace: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.trace = trace
        self.rank = rank


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
