"""Have ranks go on without those that have died: who lives, what all have done, and what each leaves behind.

Training is a row of sections (a step until its gradients are reduced, a validation, a save), each of which counts on
all ranks or on none. The command and its ranks share a board, memory that outlives each of them:

    rank 0    ── section 7 ── done 7 ── 8 ┐ rings  ┌ asks ┐           ┌ section 8 again, with rank 1's samples
    rank 1    ── section 7 ── done 7 ── 8 ✕        │      │           │
    command   ────────────────────────────┴ dead 1 ┴──────┴ group 1: ─┤ ranks 0, 2
    rank 2    ── section 7 ── done 7 ─────── 8 ────── asks┘           └ section 8 again

A rank goes beyond a section only once all have done it. So when one dies, the living are within one section, and none
has changed its weights in it. The command, which hears of a death at once, rings, and each survivor's thread cuts its
connections: what waits in a collective fails. Once all survivors ask for a new group, the command says who is in it.
"""

import math
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch.distributed as dist

from ._heartbeat import is_about_communication
from .processes import LOOK_S
from .store import PEER_LOST, RankError, connections, poll

_ROW = 16
DONE, _ARMED, _DEAD, _ASKS, _READY, _IS_MEMBER, _IN_BASE, _NEWEST, _SLOTS = range(9)
"""Words of a rank: sections done; whether it can go on without others; whether it has died; the group that it asks for;
the last group in which it was ready; whether it is in the group; whether it was in the group whose records count; which
of its two records is newer; and the first word about these records (group, section and length of each)."""
_GROUP, _SECTION, _BASE = range(3)
"""Words of all: the number of the group, the last section that it has done, and the group whose records count."""

_DEATH_S = 5e-3
"""Seconds between two looks at whether a rank has died for which others wait."""


class Board:
    """Memory, and bells, that a command shares with the ranks that it forks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.command = num_ranks, os.getpid()
        self._memory = mmap.mmap(-1, 8 * _ROW * (num_ranks + 1))
        self._words = memoryview(self._memory).cast("q")
        self._records = [[os.memfd_create("evener-record") for _ in range(2)] for _ in range(num_ranks)]
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(num_ranks + 1)]
        """One per rank; the last one is the command's."""
        self._turns = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(num_ranks)]
        for rank in range(num_ranks):
            self.set(rank, _IS_MEMBER, 1)
            self.set(rank, _IN_BASE, 1)

    def get(self, rank: int, word: int) -> int:
        """Read a word of a rank; rank -1 has those of all."""
        return self._words[_ROW * (rank + 1) + word]

    def set(self, rank: int, word: int, value: int) -> None:
        """Write one."""
        self._words[_ROW * (rank + 1) + word] = value

    @property
    def group(self) -> int:
        """The number of the group."""
        return self.get(-1, _GROUP)

    @property
    def section(self) -> int:
        """The last section that all of the group have done, when it was formed."""
        return self.get(-1, _SECTION)

    def reach(self, rank: int, word: int, value: int) -> None:
        """Write a word of a rank for which others may wait."""
        self.set(rank, word, value)
        for turn in self._turns:
            os.eventfd_write(turn, 1)

    def wait(self, rank: int) -> None:
        """Have a rank wait until another one has reached something."""
        if select.select([self._turns[rank]], [], [], _DEATH_S)[0]:
            os.eventfd_read(self._turns[rank])

    def ask(self, rank: int, group: int) -> None:
        """Have a rank ask for a group."""
        self.set(rank, _ASKS, group)
        self.ring(-1)

    def arm(self, rank: int, is_armed: bool) -> None:
        """Note whether a rank can go on without others."""
        self.set(rank, _ARMED, int(is_armed))

    def ranks(self, word: int) -> list[int]:
        """The ranks with a word that is set."""
        return [rank for rank in range(self.num_ranks) if self.get(rank, word)]

    def write(self, rank: int, group: int, section: int, record: bytes) -> None:
        """Keep what a rank leaves behind of a group's section; the record before stays until the next one."""
        slot = 1 - self.get(rank, _NEWEST)
        words = _SLOTS + 3 * slot
        self.set(rank, words + 1, -1)
        os.pwrite(self._records[rank][slot], record, 0)
        self.set(rank, words, group)
        self.set(rank, words + 2, len(record))
        self.set(rank, words + 1, section)
        self.set(rank, _NEWEST, slot)

    def read(self, rank: int, group: int, section: int, holds: bool = False) -> bytes:
        """What a rank has left behind; if that `holds`, the next record takes the other one's place."""
        for slot in range(2):
            words = _SLOTS + 3 * slot
            if (self.get(rank, words), self.get(rank, words + 1)) == (group, section):
                if holds:
                    self.set(rank, _NEWEST, slot)
                return os.pread(self._records[rank][slot], self.get(rank, words + 2), 0)
        raise RankError(f"rank {rank} has left no record of section {section}.")

    def ring(self, bell: int) -> None:
        """Wake up a rank, or the command (-1)."""
        with suppress(BlockingIOError):
            os.eventfd_write(self.bells[bell], 1)

    def close(self) -> None:
        """Give the memory back."""
        for descriptor in (*self.bells, *self._turns, *(one for pair in self._records for one in pair)):
            os.close(descriptor)


class Agent:
    """The command's side of a board: it finds who has died, and calls those together that live."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def lose(self, rank: int, statuses: Sequence[int | None]) -> bool:
        """Take a rank that was killed out of the run; False if the others can't go on without it."""
        board = self.board
        if board.get(rank, _DEAD):
            return True
        living = [other for other, status in enumerate(statuses) if status is None]
        in_order = any(status is not None and status >= 0 for status in statuses)
        if in_order or not living or not all(board.get(other, _ARMED) for other in living):
            return False
        board.set(rank, _DEAD, 1)
        for other in living:
            board.ring(other)
        return True

    @property
    def dead(self) -> list[int]:
        """The ranks that have died, without which the others have gone on."""
        return self.board.ranks(_DEAD)

    def can_lose(self, rank: int) -> bool:
        """Whether the others can go on without a rank."""
        return bool(self.board.get(rank, _ARMED))

    def wait(self, pids: Mapping[int, int], timeout_s: float) -> None:
        """Wait until a process ends or a rank rings, and form a group that is asked for."""
        descriptors = list[int]()
        try:
            with suppress(ProcessLookupError):  # one that has ended, and has been waited for already
                for pid in pids.values():
                    descriptors.append(os.pidfd_open(pid))
                wait([self.board.bells[-1], *descriptors], min(timeout_s, LOOK_S))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        with suppress(BlockingIOError):
            os.eventfd_read(self.board.bells[-1])
        self.assemble()

    def assemble(self) -> None:
        """Form a group of the ranks that live, once all of them ask for it."""
        board = self.board
        members, group = board.ranks(_IS_MEMBER), board.group
        living = [rank for rank in members if not board.get(rank, _DEAD)]
        if not living or any(board.get(rank, _ASKS) <= group for rank in living):
            return
        if all(board.get(rank, _READY) >= group for rank in members):  # else the records before count still
            board.set(-1, _BASE, group)
            for rank in range(board.num_ranks):
                board.set(rank, _IN_BASE, int(rank in members))
        board.set(-1, _SECTION, min(board.get(rank, DONE) for rank in board.ranks(_IN_BASE)))
        for rank in set(members).difference(living):
            board.set(rank, _IS_MEMBER, 0)
        board.set(-1, _GROUP, group + 1)  # last: ranks read the rest once they see it


class Regrouped(NamedTuple):
    """A new group: its number, its ranks as they were numbered in the group before, and what each of these has left."""

    number: int
    kept: list[int]
    rank: int
    records: list[bytes]


class Survivor:
    """A rank's side of a board.

    Attributes:
        rank: as the command has numbered it; in the group it has its place among those that live.
        group: the number of the group.
        when_first: called once this rank has become the first of its group.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.group = board, rank, 0
        self._section, self._members = 0, list(range(board.num_ranks))
        self._kept: set[int] = set()
        self._lock = threading.Lock()
        self.when_first: list[Callable[[], None]] = []
        threading.Thread(target=self._listen, name="evener-survivor", daemon=True).start()

    def _listen(self) -> None:
        while select.select([self.board.bells[self.rank]], [], []):
            with suppress(BlockingIOError):
                os.eventfd_read(self.board.bells[self.rank])
            with self._lock:  # of a death that the group knows already it may hear late
                if any(self.board.get(rank, _DEAD) for rank in self.board.ranks(_IS_MEMBER)):
                    PEER_LOST.set()
            while PEER_LOST.is_set():
                with self._lock:
                    if PEER_LOST.is_set():
                        self._cut_connections()
                time.sleep(0.02)

    def _cut_connections(self) -> None:
        """Shut those of the group, which stay on this machine and came after those that are kept."""
        for number, (host, _), connection in connections():
            if number not in self._kept and host.startswith(("127.", "::1")):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def keep_connections(self) -> None:
        """Cut none of the connections that there are now where a rank is lost; a group's come later."""
        with self._lock:
            self._kept = {number for number, *_ in connections()}

    def arm(self, is_armed: bool = True) -> None:
        """Tell whether this rank can go on without others."""
        self.board.arm(self.rank, is_armed)

    def has_lost(self, exc: BaseException) -> bool:
        """Whether an error is that of a rank that has died."""
        told = isinstance(exc, RankError) or is_about_communication(exc)
        return PEER_LOST.wait(2.0 if told else 0.0)

    def commit(self, record: bytes) -> None:
        """Have done a section, and wait until all have; the others need `record` if this rank dies in the next one.

        Raises:
            RankError: a rank has died in it, so that it is to be done again.
        """
        section = self._section = self._section + 1
        self.board.write(self.rank, self.group, section, record)
        self.board.reach(self.rank, DONE, section)
        self._wait(DONE, section)

    def _wait(self, word: int, value: int) -> None:
        """Wait until a word of all ranks of the group has come to a value."""
        board = self.board
        while behind := [rank for rank in self._members if board.get(rank, word) < value]:
            if any(board.get(rank, _DEAD) or board.get(rank, _ASKS) > self.group for rank in behind):
                raise RankError("a rank has died")
            board.wait(self.rank)

    def ready(self, record: bytes) -> None:
        """Go on in the new group from here, leaving another record of the last section, once all have.

        Raises:
            RankError: yet another rank has died.
        """
        self.board.write(self.rank, self.group, self._section, record)
        self.board.reach(self.rank, _READY, self.group)
        self._wait(_READY, self.group)  # the next record takes the place of the group before's

    def regroup(self, timeout_s: float) -> Regrouped:
        """Wait for the group of those that live, and give up the work of the section that was lost."""
        board, deadline_s = self.board, time.monotonic() + timeout_s
        while True:
            board.ask(self.rank, self.group + 1)
            while board.group == self.group:
                if time.monotonic() > deadline_s:
                    raise RankError(f"rank {self.rank} waited {timeout_s:g} s for the others after a rank had died.")
                time.sleep(5e-4)
            self.group += 1
            with self._lock:
                PEER_LOST.clear()
                self._kept = {number for number, *_ in connections()}
            members = board.ranks(_IS_MEMBER)
            if not any(board.get(rank, _DEAD) for rank in members):
                break
        self._section = board.section
        board.set(self.rank, DONE, self._section)
        before, self._members = self._members, members
        base, group = board.ranks(_IN_BASE), board.get(-1, _BASE)
        records = [board.read(rank, group, self._section, rank == self.rank) for rank in base]
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
