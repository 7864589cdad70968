"""Start processes by fork from a server that has imported the libraries of every rank."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path


def context() -> ForkServerContext:
    """Return the context whose processes come from the server, which is started where none runs."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before or ""])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return found
