"""Have ranks go on without those that have died: who lives, what all have done, and what each leaves behind.

Training is a row of sections (a step until its gradients are reduced, a validation, a save). A rank goes beyond one
once all have done it, so that where one dies the living are within one section, in which none has changed its weights.
The command notes a death on a board that outlives each rank. A survivor's thread reads it there, and cuts the
connections: what waits in a collective fails. Once all survivors ask for a new group, the command says who is in it.
"""

import math
import mmap
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ._watch import is_about_communication
from .store import PEER_LOST, RankError, connections, poll

_ROW = 8
_DONE, _ARMED, _DEAD, _ASKS, _READY, _IS_MEMBER = range(6)
"""Words of a rank: sections done; whether it can go on without others; whether it has died; the group that it asks for;
the last group in which it was ready; and whether it is in the group."""
_GROUP, _SECTION, _BASE = range(3)
"""Words of all: the number of the group, the last section that it has done, and the group whose records count."""

LOOK_S, _STEP_S = 0.02, 1e-4
"""Seconds between two looks of the command, and of a rank's thread, at who has died; of a rank at others in a step."""


class Board:
    """What a command and the ranks that it forks share: words in memory, and a folder of records that ranks leave."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self.num_ranks, self._folder = num_ranks, folder
        self._memory = mmap.mmap(-1, 8 * _ROW * (num_ranks + 1))
        self._words = memoryview(self._memory).cast("q")
        self._base = list(range(num_ranks))  # the ranks of the group whose records count
        for rank in self._base:
            self.set(rank, _IS_MEMBER, 1)

    def get(self, rank: int, word: int) -> int:
        """Read a word of a rank; rank -1 has those of all."""
        return self._words[_ROW * (rank + 1) + word]

    def set(self, rank: int, word: int, value: int) -> None:
        """Write one."""
        self._words[_ROW * (rank + 1) + word] = value

    def ranks(self, word: int) -> list[int]:
        """The ranks with a word that is set."""
        return [rank for rank in range(self.num_ranks) if self.get(rank, word)]

    def record(self, rank: int, group: int, section: int) -> Path:
        """The file of what a rank leaves behind of a group's section, whole once it has done that."""
        return self._folder / f"record-{rank}-{group}-{section}"

    def lose(self, rank: int, statuses: Sequence[int | None]) -> bool:
        """Take a rank that was killed out of the run; False if the others can't go on without it."""
        if not self.get(rank, _DEAD):
            living = [other for other, status in enumerate(statuses) if status is None]
            in_order = any(status is not None and status >= 0 for status in statuses)
            if in_order or not living or not all(self.get(other, _ARMED) for other in living):
                return False
            self.set(rank, _DEAD, 1)
        return True

    @property
    def armed(self) -> list[int]:
        """The ranks without which the others can go on."""
        return self.ranks(_ARMED)

    @property
    def dead(self) -> list[int]:
        """The ranks that have died, without which the others go on."""
        return self.ranks(_DEAD)

    def assemble(self) -> None:
        """Form a group of the ranks that live, once all of them ask for it."""
        members, group = self.ranks(_IS_MEMBER), self.get(-1, _GROUP)
        living = [rank for rank in members if not self.get(rank, _DEAD)]
        if not living or any(self.get(rank, _ASKS) <= group for rank in living):
            return
        if all(self.get(rank, _READY) >= group for rank in members):  # else the records before count still
            self.set(-1, _BASE, group)
            self._base = members
        self.set(-1, _SECTION, min(self.get(rank, _DONE) for rank in self._base))
        for rank in set(members).difference(living):
            self.set(rank, _IS_MEMBER, 0)
        self.set(-1, _GROUP, group + 1)  # last: ranks read the rest once they see it


class Regrouped(NamedTuple):
    """A new group: its number, its ranks as they were numbered in the group before, and what each of these has left."""

    number: int
    kept: list[int]
    rank: int
    records: list[bytes]


class Survivor:
    """A rank's side of a board; `when_first` is called once it has become the first of its group, whose number changes.

    Its rank stays as the command has numbered it; in the group it has its place among those that live.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.group = board, rank, 0
        self._section, self._members = 0, list(range(board.num_ranks))
        self._kept = set[int]()
        self._lock = threading.Lock()
        self.when_first: list[Callable[[], None]] = []
        threading.Thread(target=self._look, name="evener-survivor", daemon=True).start()

    def _look(self) -> None:
        """Cut the connections of the group, which stay on this machine, from a death on until there is another one."""
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                if any(self.board.get(rank, _DEAD) for rank in self.board.ranks(_IS_MEMBER)):
                    PEER_LOST.set()
                for number, (host, _), connection in connections() if PEER_LOST.is_set() else ():
                    if number not in self._kept and host.startswith(("127.", "::1")):
                        with suppress(OSError):
                            connection.shutdown(socket.SHUT_RDWR)

    def keep_connections(self) -> None:
        """Cut none of the connections that there are now where a rank is lost; a group's come later."""
        with self._lock:
            self._kept = {number for number, *_ in connections()}

    def arm(self, is_armed: bool = True) -> None:
        """Tell whether this rank can go on without others."""
        self.board.set(self.rank, _ARMED, int(is_armed))

    def has_lost(self, exc: BaseException) -> bool:
        """Whether an error is that of a rank that has died."""
        told = isinstance(exc, RankError) or is_about_communication(exc)
        return PEER_LOST.wait(2.0 if told else 0.0)

    def commit(self, record: bytes) -> None:
        """Have done a section, leaving `record`, and wait until all have, or raise a RankError where one has died."""
        section = self._section = self._section + 1
        self.board.record(self.rank, self.group, section).write_bytes(record)
        self.board.record(self.rank, self.group, section - 2).unlink(missing_ok=True)
        self._reach(_DONE, section)

    def ready(self, record: bytes) -> None:
        """Go on in the new group, leaving another record of the last section, once all do, or raise a RankError."""
        self.board.record(self.rank, self.group, self._section).write_bytes(record)
        self._reach(_READY, self.group)

    def _reach(self, word: int, value: int) -> None:
        """Have a word come to a value, and wait until those of all ranks of the group have."""
        board = self.board
        board.set(self.rank, word, value)
        while behind := [rank for rank in self._members if board.get(rank, word) < value]:
            if any(board.get(rank, _DEAD) or board.get(rank, _ASKS) > self.group for rank in behind):
                raise RankError("a rank has died")
            time.sleep(_STEP_S)

    def regroup(self, timeout_s: float) -> Regrouped:
        """Wait for the group of those that live, and give up the work of the section that was lost."""
        board, deadline_s = self.board, time.monotonic() + timeout_s
        while True:
            board.set(self.rank, _ASKS, self.group + 1)
            while board.get(-1, _GROUP) == self.group:
                if time.monotonic() > deadline_s:
                    raise RankError(f"rank {self.rank} waited {timeout_s:g} s for the others after a rank had died.")
                time.sleep(_STEP_S)
            self.group += 1
            with self._lock:
                PEER_LOST.clear()
                self._kept = {number for number, *_ in connections()}
            members = board.ranks(_IS_MEMBER)
            if not any(board.get(rank, _DEAD) for rank in members):
                break
        self._section = board.get(-1, _SECTION)
        board.set(self.rank, _DONE, self._section)
        before, self._members = self._members, members
        left = [board.record(rank, board.get(-1, _BASE), self._section) for rank in range(board.num_ranks)]
        records = [path.read_bytes() for path in left if path.exists()]
        return Regrouped(self.group, [before.index(rank) for rank in members], members.index(self.rank), records)


own: Survivor | None = None
"""This process's, if its command can have ranks go on without others."""


class _Connecting(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, dist.ProcessGroupGloo)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made: list[Any] = []

        def connect() -> None:
            try:
                made.append(dist.ProcessGroupGloo(*args, **kwargs))
            except Exception as exc:  # noqa: BLE001  # raised below
                made.append(exc)

        threading.Thread(target=connect, name="evener-connect", daemon=True).start()
        poll(lambda: bool(made), math.inf)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]


class Connecting(metaclass=_Connecting):
    """Stands for torch's class of gloo's groups: connects in a thread, which is left alone where a rank dies meanwhile.

    gloo waits there for several times its timeout, and nothing ends that.
    """
