"""Set environment variables of worker processes, and report their failures."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

AGENT = "EVENER_AGENT_PID"
"""Environment variable that holds the process id of a worker's parent."""


class WorkerError(RuntimeError):
    """A worker failed; the message contains its rank and traceback."""


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
