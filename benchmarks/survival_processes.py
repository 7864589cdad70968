"""Processes that a program has started, directly or not: find them, wait for them, end them. Linux only."""

import ctypes
import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


class Terminal:
    """A pseudo-terminal: it controls the leader of a session that opens its `path`, and copies the output to a file."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._master, self._slave = os.openpty()
        self.path = Path(os.ttyname(self._slave))
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def press_ctrl_c(self) -> None:
        """Send SIGINT to all processes in the foreground."""
        os.write(self._master, b"\x03")

    def close(self) -> None:
        """Close the window, if it is open: its processes get SIGHUP, and can't write to it any more."""
        if self._thread.is_alive():
            os.write(self._woken, b".")
            self._thread.join()

    def _read(self) -> None:
        with self._output.open("ab", buffering=0) as file:
            while self._wake not in (ready := select.select([self._master, self._wake], [], [])[0]):
                with suppress(OSError):  # nobody has it open
                    file.write(os.read(self._master, 65536) if ready else b"")
        for descriptor in (self._master, self._slave, self._wake, self._woken):
            os.close(descriptor)


def become_reaper() -> None:
    """Adopt the orphans among this process's descendants, so that none escapes, whatever its session or group."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """All descendants of this process that are alive, parents first.

    One whose first thread has ended is dead in /proc, and yet has its other threads and its children.
    """
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # ended meanwhile
            state, parent, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(pid)
            if state in "ZX" and int(rest[15]) <= 1:  # number of threads
                ended.add(pid)
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return [pid for pid in found[1:] if pid not in ended]


def describe(pid: int) -> str:
    """Name a process."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return f"{pid} (parent {fields['PPid']}, {fields['State']}, blocks {fields['SigBlk']}) {words[:60]}"
    return str(pid)


def _handled(pid: int) -> int:
    """The signals that a process has handlers for, as a mask."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    return 0


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended; its status can still be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_end(pid: int, timeout_s: float) -> int | None:
    """Wait for a child of this process; return its exit status, or None if it does not end in time."""
    deadline = time.monotonic() + timeout_s
    while not has_ended(pid):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def all_have_ended(timeout_s: float) -> bool:
    """Wait until no descendant is alive; whether that came in time.

    A look at /proc is not a picture of one moment: a process whose parent dies meanwhile can be missed, but not twice.
    """
    deadline, num_empty = time.monotonic() + timeout_s, 0
    while num_empty < 3:
        num_empty = 0 if descendants() else num_empty + 1
        if num_empty == 0 and time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def end_all() -> list[str]:
    """Kill all descendants, and bury the dead; return those that were alive."""
    left = [describe(pid) for pid in descendants()]
    for pid in descendants():
        handled = _handled(pid)
        if handled >> (signal.SIGUSR2 - 1) & 1:
            os.kill(pid, signal.SIGUSR2)
    time.sleep(0.5 if left else 0)
    while alive := descendants():
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return left
