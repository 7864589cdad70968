"""Let micro-batches compute their losses last, where they meet on the first stage's device.

One thread that launches micro-batches in order would queue the loss of the first on the first device, where it waits
for the last stage; and behind it the second micro-batch, which could have started:

    in order       0: F1 . . L1 F2 . . L2     losses last    0: F1 F2 F3 . L1 L2 L3
                   1:    F1 .    .  F2 .                     1:    F1 F2 F3

So each micro-batch has a thread, of which one runs at a time. A micro-batch pauses where its output meets, and goes on
when all others have come that far.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class LossesLast:
    """Passes the turn among the micro-batches of one step."""

    def __init__(self, num_microbatches: int) -> None:
        self._order = deque(range(num_microbatches))
        self._has_paused: set[int] = set()
        self._changed = threading.Condition()

    def run(self, microbatch: int, call: Callable[[], Any]) -> Any:
        """Run a micro-batch in its turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == microbatch)
        try:
            return call()
        finally:
            with self._changed:
                self._order.remove(microbatch)
                self._changed.notify_all()

    def pause(self, microbatch: int) -> None:
        """Let the others go first, once."""
        if microbatch in self._has_paused:
            return
        self._has_paused.add(microbatch)
        with self._changed:
            self._order.rotate(-1)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._order[0] == microbatch)
