"""Start the processes of one machine's ranks, and wait until all of them have ended, within bounds."""

import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MethodType
from typing import Any

import torch.multiprocessing as multiprocessing_of_torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from ...core.errors import ConfigError
from ...core.files import replacing
from ..process_exit import LAST_WORDS_S, forking, kill_frozen
from ..store import RankError
from ._handback import reduce_method

STOPS_ALONE = 128 + signal.SIGTERM
"""Exit status of a rank that has stopped by a signal, without the others."""
POLL_S = 0.1
"""Seconds between two looks for processes that are frozen, once one has failed."""


class RankProcesses:
    """Processes that do the same work, each as one rank; one that fails leaves its traceback in a folder."""

    def __init__(self, method: str, folder: Path, timeout_s: float) -> None:
        self.method = method
        self.folder = folder
        self.timeout_s = timeout_s
        self.processes: list[BaseProcess] = []

    def start(self, work: Callable[..., None], num_ranks: int, *args: Any) -> None:
        """Start `work(rank, *args)` in a process per rank."""
        context: Any = multiprocessing.get_context(self.method)
        with forking() if self.method == "fork" else shared_by_name():
            for rank in range(num_ranks):
                process = context.Process(target=_main, args=(work, rank, str(self.folder), args))
                process.start()
                self.processes.append(process)

    def kill(self, signum: int) -> None:
        """Send a signal to those that are alive."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def join(self) -> int | None:
        """Wait for the end of all, and return the rank that failed first; the others have moments to end then."""
        waiting = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        failed: int | None = None
        late: list[int] = []
        deadline = math.inf
        while waiting:
            poll = 1.0 if failed is None else POLL_S
            wait(list(waiting), max(0.0, min(poll, deadline - time.monotonic())))
            # what a rank has forked, such as a data worker, may hold its sentinel for longer than the rank lives
            for sentinel in [each for each, rank in waiting.items() if not self.processes[rank].is_alive()]:
                rank = waiting.pop(sentinel)
                self.processes[rank].join()
                if self.processes[rank].exitcode and failed is None and not late:
                    failed, deadline = rank, time.monotonic() + LAST_WORDS_S + 1
                    self.kill(signal.SIGTERM)
                elif math.isinf(deadline):
                    deadline = time.monotonic() + self.timeout_s
            if time.monotonic() >= deadline:
                late, deadline = sorted(waiting.values()), math.inf
                self.kill(signal.SIGKILL)
            elif failed is not None:
                kill_frozen(one.pid for one in self.processes if one.is_alive() and one.pid is not None)
        if late and failed is None:
            raise RankError(
                f"rank {', '.join(map(str, late))} did not end within {self.timeout_s:g} s after the others had, and "
                "was killed. See what on_fit_end, teardown and threads of the module and the callbacks do there."
            )
        return failed

    def error(self, rank: int) -> BaseException:
        """Tell why a rank failed: its refusal, its traceback, or how it ended.

        A KeyboardInterrupt or SystemExit that the user's code has raised ends the script as it does on one device.
        """
        process, path = self.processes[rank], _error_file(self.folder, rank)
        if path.exists():
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["ends"]:
                rank_zero_info(f"rank {rank} has ended the run:\n\n{told['text']}")
                return SystemExit(told["code"]) if told["ends"] == "SystemExit" else KeyboardInterrupt()
            return (
                ConfigError(told["message"]) if told["refused"] else RankError(f"rank {rank} failed:\n\n{told['text']}")
            )
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return RankError(f"rank {rank} {how} (process {process.pid}).")


@contextmanager
def shared_by_name() -> Generator[None]:
    """Send tensors to processes inside the block by the names of files in shared memory, however many there are.

    By default each takes a file descriptor of the sender's and the receiver's, and a fork server passes 252 at most.
    Methods are sent under whatever name their object has them.
    """
    ForkingPickler.register(MethodType, reduce_method)
    before = multiprocessing_of_torch.get_sharing_strategy()
    multiprocessing_of_torch.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing_of_torch.set_sharing_strategy(before)


def _main(work: Callable[..., None], rank: int, folder: str, args: tuple[Any, ...]) -> None:
    try:
        work(rank, *args)
    except BaseException as exc:  # told in the script
        if isinstance(exc, SystemExit) and exc.code == STOPS_ALONE:
            raise
        ends = type(exc).__name__ if not isinstance(exc, Exception) else ""
        told = {"refused": isinstance(exc, ConfigError), "message": str(exc), "text": traceback.format_exc()}
        told |= {"ends": ends, "code": getattr(exc, "code", None)}
        with replacing(_error_file(Path(folder), rank)) as file:
            file.write_text(json.dumps(told), encoding="utf-8")
        sys.exit(1)


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error{rank}.json"
