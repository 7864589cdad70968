"""A pseudo-terminal for the run of a test: its keys, its end, and what was written to it."""

import os
import select
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

CTRL_C = b"\x03"


class Terminal:
    """A terminal: a process that opens its `path` as the leader of a session is controlled by it.

    Attributes:
        path: the device.
        output: the file that gets what is written to it.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self._master, self._slave = os.openpty()
        self.path = Path(os.ttyname(self._slave))
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def press(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._master, key)

    def close(self) -> None:
        """Close the window: the processes that the terminal controls get SIGHUP, and can't write to it any more."""
        if self._thread.is_alive():
            os.write(self._woken, b".")
            self._thread.join()

    def _read(self) -> None:
        with self.output.open("ab", buffering=0) as file:
            while True:
                ready, _, _ = select.select([self._master, self._wake], [], [])
                if self._wake in ready:
                    break
                with suppress(OSError):  # nobody has it open
                    file.write(os.read(self._master, 65536))
        for descriptor in (self._master, self._slave, self._wake, self._woken):
            os.close(descriptor)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
