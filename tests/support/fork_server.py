"""Start processes by fork from servers that have imported their libraries."""

import multiprocessing
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path


def hear_signals() -> None:
    """Handle signals as a program in a terminal does: tests may run under nohup, which ignores some."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LIBRARIES = forkserver.ForkServer()
_LIBRARIES.set_forkserver_preload(["preloaded_libraries"])


def context() -> ForkServerContext:
    """Return the context whose processes come from the server, which is started where none runs."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["preloaded"])
    with _support_on_path():
        forkserver.ensure_running()
    return found


@contextmanager
def without_lightning() -> Generator[None]:
    """Let processes that are started inside come from a server without Lightning and this package."""
    before = forkserver.connect_to_new_process
    with _support_on_path():
        _LIBRARIES.ensure_running()
    forkserver.connect_to_new_process = _LIBRARIES.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


@contextmanager
def _support_on_path() -> Generator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before or ""])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
