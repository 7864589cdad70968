"""Processes that stay alive between cases: one alone, or ranks that find the environment of torchrun.

A case costs its training only: torch and Lightning are imported once, and ranks meet once. A process that hangs or ends
is replaced together with its fellows; so is a group in which a case failed: failed collectives leave traces, and
Lightning leaves `DataLoader.__init__` patched where an exception ended it.
"""

import faulthandler
import math
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import distributed
import fork_server
from torch.distributed import TCPStore


class Group:
    """`size` processes that run the same jobs together.

    Args:
        size: number of processes.
        function: what the processes call with each job; what it gives has a `failure`, which is false if there is none.
        timeout_s: seconds that a job may take.
        grace_s: seconds that the others have after one has failed.
        gpus: whether ranks see the machine's GPUs.
    """

    def __init__(
        self, size: int, function: Callable[..., Any], timeout_s: float = 30.0, grace_s: float = math.inf,
        gpus: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.function, self.timeout_s, self.grace_s, self.gpus = size, function, timeout_s, grace_s, gpus
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.store: TCPStore | None = None
        self.log = Path(tempfile.mkdtemp(prefix="differential-"))

    def start(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = fork_server.context()
        for rank in range(self.size):
            env = distributed.torchrun_env(rank, self.size, self.store.port) if self.size > 1 else {}
            if self.gpus:
                env.pop("CUDA_VISIBLE_DEVICES", None)
            ours, theirs = context.Pipe()
            work = (theirs, env, f"{self.log}/{rank}", self.function)
            self.processes.append(context.Process(target=_serve, args=work, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.connections.append(ours)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.processes, self.connections, self.store = [], [], None

    def run(self, *job: Any) -> list[Any]:
        """What every process observed; a string for one that hung or ended."""
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send(job)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(found) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(found):
                if self.connections[rank].poll(0.01) or not self.processes[rank].is_alive():
                    found[rank] = self._received(rank)
                    if _failed(found[rank]):
                        deadline = min(deadline, time.monotonic() + self.grace_s)
        all_found = [found[rank] if rank in found else f"hung:\n{self._tail(rank)}" for rank in range(self.size)]
        if any(map(_failed, all_found)):
            self.stop()
        return all_found

    def _received(self, rank: int) -> Any:
        try:
            return self.connections[rank].recv()
        except EOFError:
            self.processes[rank].join(5)
            return f"ended with {self.processes[rank].exitcode}:\n{self._tail(rank)}"

    def _tail(self, rank: int) -> str:
        path = self.log / str(rank)
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def _failed(one: Any) -> bool:
    return isinstance(one, str) or bool(one.failure)


class Pool(dict[int, Group]):
    """Groups of every size, started when they are first needed; for their arguments see `Group`."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.make = lambda size: Group(size, function, **options)

    def __missing__(self, size: int) -> Group:
        self[size] = self.make(size)
        return self[size]

    def restart(self) -> None:
        """Replace all processes, so that nothing is left of earlier cases."""
        for group in self.values():
            group.stop()


def _serve(connection: Connection, env: dict[str, str], log: str, function: Callable[..., Any]) -> None:
    distributed.be_rank(env, log)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(15, file=sys.stderr)
        observed = function(*job)
        faulthandler.cancel_dump_traceback_later()
        connection.send(observed)
