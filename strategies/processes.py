"""Processes that a strategy starts by itself, in a plain script or a notebook."""

import ctypes
import multiprocessing
import os
import signal
import sys

import torch
from lightning_fabric.utilities.imports import _IS_INTERACTIVE

from .exceptions import ConfigError

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel (Linux) to end this process when its parent does, so that it does not outlive a killed one.

    Args:
        parent: the parent's process id, where it is known; the process ends at once if that is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def start_method(device: torch.device) -> str:
    """Choose how a plain script's processes begin, so that the script is not run once per process.

    Returns:
        `fork` on the CPU and in notebooks; `spawn` for accelerators, which a process can't hand on to its copy.

    Raises:
        ConfigError: a notebook has used its accelerator, and neither way is open.
    """
    if device.type == "cpu":
        return "fork"
    if not _IS_INTERACTIVE:
        return "spawn"
    if torch.cuda.is_initialized():
        raise ConfigError(
            "ddp: this notebook has used the GPU already, so no processes can be started from it. Use strategy=dp, "
            "which needs one process; or restart the kernel and call fit before anything touches the GPU; or run a "
            "script."
        )
    return "fork"


def prepare_forked() -> None:
    """Set up a process that was started by a strategy; called in it first."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    die_with_parent(parent.pid)
    if multiprocessing.current_process().__class__.__name__ == "ForkProcess":
        # OpenMP's threads were not copied: a process that waits for them hangs, if its parent has used them
        torch.set_num_threads(1)
