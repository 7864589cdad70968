"""Start the processes of a script's ranks, and tell in the script why one has failed."""

import json
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MethodType
from typing import Any

import torch.multiprocessing as multiprocessing_of_torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from ...core.errors import ConfigError
from ...core.files import replacing
from ..process_exit import forking
from ..processes import RankProcesses, status_of
from ..store import RankError
from ._handback import reduce_method

STOPS_ALONE = 128 + signal.SIGTERM
"""Exit status of a rank that has stopped by a signal, without the others."""


def start(
    ranks: RankProcesses, num_ranks: int, method: str, folder: Path, work: Callable[..., None], *args: Any
) -> None:
    """Start `work(rank, *args)` in a process per rank; one that fails leaves its traceback in a folder."""
    context: Any = multiprocessing.get_context(method)
    with forking() if method == "fork" else shared_by_name():
        for rank in range(num_ranks):
            process = context.Process(target=_main, args=(work, rank, str(folder), args))
            process.start()
            ranks.processes.append(process)


def error(ranks: RankProcesses, rank: int, folder: Path) -> BaseException:
    """Tell why a rank failed: its refusal, its traceback, or how it ended.

    A KeyboardInterrupt or SystemExit that the user's code has raised ends the script as it does on one device.
    """
    path = _error_file(folder, rank)
    if not path.exists():
        process, status = ranks.processes[rank], status_of(ranks.processes[rank]) or 0
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return RankError(f"rank {rank} {how} (process {process.pid}).")
    told = json.loads(path.read_text(encoding="utf-8"))
    if told["ends"]:
        rank_zero_info(f"rank {rank} has ended the run:\n\n{told['text']}")
        return SystemExit(told["code"]) if told["ends"] == "SystemExit" else KeyboardInterrupt()
    return ConfigError(told["message"]) if told["refused"] else RankError(f"rank {rank} failed:\n\n{told['text']}")


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
