"""Start processes by fork from servers that have imported their libraries."""

import multiprocessing
import os
import signal
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch


def hear_signals() -> None:
    """Handle signals as a program in a terminal does: tests may run under nohup, which ignores some."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LIBRARIES = forkserver.ForkServer()
_LIBRARIES.set_forkserver_preload(["preloaded"])
_OURS = (
    "pytest evener.examples.digits evener.strategies evener.trainer evener.trainer.cli.main evener.trainer.cli.train "
    "evener.trainer.job.run evener.trainer.launch.launcher evener.trainer.trainer"
)


def context() -> ForkServerContext:
    """Return the context whose processes come from the server, which is started where none runs."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["preloaded"])
    with _server_environment(PRELOADED=_OURS):
        forkserver.ensure_running()
    return found


@contextmanager
def without_lightning() -> Generator[None]:
    """Let processes that are started inside come from a server without Lightning and this package."""
    before = forkserver.connect_to_new_process
    with _server_environment():
        _LIBRARIES.ensure_running()
    forkserver.connect_to_new_process = _LIBRARIES.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


def _server_environment(**variables: str) -> AbstractContextManager[Any]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return patch.dict(os.environ, {**variables, "PYTHONPATH": os.pathsep.join(paths)})
