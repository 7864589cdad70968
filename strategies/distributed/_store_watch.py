"""Put a deadline on every read and write of a store: torch's have none once the store's host is frozen.

A host that is killed closes its connections, and whoever reads from it fails at once. One that is frozen (a stopped
process, a machine that is suspended, a network that is cut) answers nothing, and torch's client waits without end, in
native code, where no handler of a signal runs. So a thread asks the store for something once a second, another counts
the seconds without an answer, and shuts the connections when there are too many: then every read fails.
"""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress

from torch.distributed import Store

RANK_FAILED = threading.Event()
"""Set in every rank once any of them has failed or gone: nobody is left to agree with on when to stop."""

PEER_LOST = threading.Event()
"""Set in the other ranks once one has died without which they can go on; every wait for it ends."""

PING_S = 0.5
"""Seconds between two questions."""


class StoreWatch:
    """Watches one store on a connection of its own, and shuts all (`silent`) once it has not answered in time."""

    def __init__(self, store: Store, address: str, port: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.silent = False
        self.place = f"{address}:{port}"
        self._peer = (address, port)
        self._num_answers = 0
        self._ended = threading.Event()
        self._asking = threading.Thread(target=self._ask, args=(store,), name="evener-store", daemon=True)
        self._counting = threading.Thread(target=self._count, name="evener-store-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._asking.start()
        self._counting.start()

    def end(self) -> None:
        """End the threads, unless one waits for an answer."""
        self._ended.set()
        for thread in (self._counting, self._asking):
            thread.join(timeout=0.2)

    def _ask(self, store: Store) -> None:
        with suppress(RuntimeError):  # the host has gone: whoever reads fails by itself
            while not self._ended.wait(PING_S):
                store.check(["answer"])
                self._num_answers += 1
        self._ended.set()

    def _count(self) -> None:
        # seconds are counted, not read from a clock: this process may have been frozen itself
        before, num_missed = 0, 0
        while not self._ended.wait(PING_S):
            num_missed = num_missed + 1 if self._num_answers == before else 0
            before = self._num_answers
            if num_missed * PING_S > self.deadline_s:
                self.silent = True
                RANK_FAILED.set()
                for connection in _connections(*self._peer):
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                return


def _connections(address: str, port: int) -> Iterator[socket.socket]:
    """Copies of this process's sockets that are connected to a place."""
    hosts = {info[4][0] for info in socket.getaddrinfo(address, port)}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # no socket, not connected, or closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                peer = connection.getpeername() if internet else ("", 0)
                if peer[1] == port and str(peer[0]).removeprefix("::ffff:") in hosts:
                    yield connection
