"""Start the processes of a plain script or notebook from `fit`, and stop them at a signal to any of them."""

import ast
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
from lightning_fabric.utilities.imports import _IS_INTERACTIVE
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.trainer.call import _interrupt
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessExitedException

from ..core.errors import ConfigError
from .store import leave_store

STOPPED = "stopped by a signal"
"""Result of the processes if they stopped together after a signal to any of them."""

_handlers_before: dict[int, Any] = {}
"""The script's own signal handlers, replaced while it waits for its processes."""


def start_method(device: torch.device) -> str:
    """Choose how a plain script's processes start, so that the script does not run once per process.

    Returns:
        `fork` on the CPU and in notebooks; `spawn` for accelerators, because a forked process can't use their state.

    Raises:
        ConfigError: a notebook has used its accelerator already, so neither works.
    """
    if device.type == "cpu":
        return "fork"
    if not _IS_INTERACTIVE:
        return "spawn"
    if torch.cuda.is_initialized():
        raise ConfigError(
            "ddp: this notebook has used the GPU already, so it can't start processes. Use strategy=dp, which "
            "needs one process; or restart the kernel and call fit before anything uses the GPU; or run a script."
        )
    return "fork"


def verify_guarded() -> None:
    """Verify that a script does not call `fit` on import, because spawned processes import it.

    Raises:
        ConfigError: it does, so each process would run the script up to that line.
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
            f"ddp: line {frame.f_lineno} of {os.path.basename(path)} starts processes that import the script and would"
            ' run it again. Put that line under `if __name__ == "__main__":`, or start with torchrun.'
        )


def script_launcher(strategy: pl_strategies.ParallelStrategy) -> _MultiProcessingLauncher:
    """Make Lightning's launcher of processes, changed so that ranks handle their own exceptions.

    Lightning handles exceptions in the parent, which can no longer ask the ranks, and waits without a timeout for the
    result of a rank that was asked to stop.
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
    try:
        with forwarded_signals(launcher) as received:
            result = _result(launcher, partial(_in_rank, trainer, work), *args, trainer=trainer, **kwargs)
            if received or result == STOPPED:
                raise _stop(received[0] if received else signal.SIGTERM)
            return result
    except BaseException:
        _hide_callbacks(trainer)
        raise


def _result(launcher: _MultiProcessingLauncher, in_rank: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return _MultiProcessingLauncher.launch(launcher, in_rank, *args, **kwargs)
    except ProcessExitedException as exc:
        if exc.exit_code == 128 + signal.SIGTERM:
            return STOPPED
        raise


def _hide_callbacks(trainer: Any) -> None:
    """Prevent `on_exception` of the callbacks in the parent: the ranks have called it, and nothing is to be saved here.

    Args:
        trainer: the trainer; its callbacks are restored in the strategy's teardown, which comes next.
    """
    trainer.strategy.at_teardown = partial(setattr, trainer, "callbacks", trainer.callbacks)
    trainer.callbacks = []


@contextmanager
def forwarded_signals(launcher: _MultiProcessingLauncher) -> Generator[list[int]]:
    """Forward SIGTERM and Ctrl-C to the processes, which stop at the same step; a second signal kills them.

    Args:
        launcher: owns the processes.

    Yields:
        The signals received so far.
    """
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) > 1 or not launcher.procs:
            launcher.kill(signal.SIGKILL)
            raise _stop(signum)
        launcher.kill(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    for signum in (signal.SIGTERM, signal.SIGINT):
        _handlers_before[signum] = signal.signal(signum, forward)
    try:
        yield received
    finally:
        for signum in list(_handlers_before):
            signal.signal(signum, _handlers_before.pop(signum))


def _stop(signum: int) -> BaseException:
    """The exception that `fit` raises after a signal, the same as Lightning's on one device."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SIGTERMException(128 + signum)


def _in_rank(trainer: pl.Trainer, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for signum in list(_handlers_before):
        signal.signal(signum, _handlers_before.pop(signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the script forwards it
    try:
        return work(*args, **kwargs)
    except SIGTERMException as exc:
        _interrupt(trainer, exc)
        if getattr(trainer.strategy, "stop_signal", None) is None:  # this rank stops alone
            raise SystemExit(128 + signal.SIGTERM) from exc
        return STOPPED
    except BaseException as exc:
        _interrupt(trainer, exc)
        raise
    finally:
        leave_store()
