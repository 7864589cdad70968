"""How the processes of a run begin, in a plain script or a notebook, and how they end wherever they were started."""

import ast
import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
import torch.distributed as dist
from lightning_fabric.utilities.imports import _IS_INTERACTIVE
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.trainer.call import _interrupt

from .exceptions import ConfigError
from .watch import RANK_FAILED

PR_SET_PDEATHSIG = 1

FORKED_GRACE_S = 5.0
"""Seconds from SIGTERM to the end of a process that a strategy has started."""

LAST_WORDS_S = 2.0
"""Seconds that a process has once it is asked to stop after a rank has failed, so that there is no step to agree on: to
name that rank, which takes one second, and to put what it logged on the disk."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel (Linux) to end this process when its parent does, so that it does not outlive a killed one.

    Args:
        parent: the parent's process id, where it is known; the process ends at once if that is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def leave_in_time(grace_s: float) -> None:
    """End this process for good if it is asked to stop and does not within some seconds.

    A thread hears of the signal, even while the main thread waits for a rank that will never answer, where no handler
    of Python's runs. torch's agent, and its launcher of plain scripts, would wait half a minute after a failure.

    Args:
        grace_s: seconds from SIGTERM or SIGINT to the end; less where another rank has failed.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_kill_late, args=(read_end, grace_s), name="evener-leave", daemon=True).start()


def _kill_late(read_end: int, grace_s: float) -> None:
    while os.read(read_end, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
        continue
    deadline = time.monotonic() + grace_s
    if RANK_FAILED.wait(grace_s):
        time.sleep(max(0.0, min(LAST_WORDS_S, deadline - time.monotonic())))
    os.kill(os.getpid(), signal.SIGKILL)


def leave_group_at_exit() -> None:
    """Have torch's process group ended before the interpreter is: its threads must not outlive what they use."""
    atexit.unregister(leave_group)  # once, however many groups a process has had
    atexit.register(leave_group)


def leave_group() -> None:
    """End torch's process group and its threads, unless a rank has failed, whom they would wait for."""
    if dist.is_initialized() and not RANK_FAILED.is_set():
        dist.destroy_process_group()
        gc.collect()  # modules hold the group in cycles, and its threads end with the last that does


def end_process(status: int) -> NoReturn:
    """End this process as `multiprocessing` ends its own: all is written, and the interpreter is not taken apart.

    torch's threads (gloo's, the store's, autograd's) still run then, and now and then one of them aborts the process
    whose work is done.

    Args:
        status: the exit status.
    """
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for threads that are no daemons
        atexit.unregister(leave_group)  # the end of the process ends it
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


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


def verify_guarded() -> None:
    """Check that a script whose processes are spawned, and so import it, does not call `fit` while it is imported.

    Raises:
        ConfigError: it does, and each process would run the script up to that line.
    """
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_globals is main and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    path = main.get("__file__")
    if frame is None or path is None or not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        statements = [node for node in ast.parse(file.read()).body if node.lineno <= frame.f_lineno]
    if not any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in statements):
        raise ConfigError(
            f"ddp: line {frame.f_lineno} of {os.path.basename(path)} starts processes that import the script, and would"
            ' run it once more each. Put that line under `if __name__ == "__main__":`, or start with torchrun.'
        )


def script_launcher(strategy: pl_strategies.ParallelStrategy) -> _MultiProcessingLauncher:
    """Make what starts a plain script's processes: Lightning's launcher, whose ranks say themselves why they fail.

    Lightning handles exceptions in the parent, where no rank can be asked any more.
    """
    method: Any = start_method(strategy.root_device)
    launcher = _MultiProcessingLauncher(strategy, start_method=method)
    vars(launcher)["launch"] = partial(_launch, launcher)
    return launcher


def _launch(
    launcher: _MultiProcessingLauncher, work: Callable[..., Any], *args: Any, trainer: pl.Trainer, **kwargs: Any
) -> Any:
    if launcher._start_method == "spawn":
        verify_guarded()
    in_rank = partial(_in_rank, trainer, work)
    return _MultiProcessingLauncher.launch(launcher, in_rank, *args, trainer=trainer, **kwargs)


def _in_rank(trainer: pl.Trainer, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return work(*args, **kwargs)
    except BaseException as exc:
        _interrupt(trainer, exc)
        raise


def prepare_forked() -> None:
    """Set up a process that was started by a strategy; called in it first."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    die_with_parent(parent.pid)
    leave_in_time(FORKED_GRACE_S)
    if multiprocessing.current_process().__class__.__name__ == "ForkProcess":
        # OpenMP's threads were not copied: a process that waits for them hangs, if its parent has used them
        torch.set_num_threads(1)
