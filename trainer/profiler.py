"""Profile a run, and show the slowest actions in a table that fits on a screen."""

import time

from pytorch_lightning.profilers import SimpleProfiler
from typing_extensions import override

TRIVIAL_PART = 0.001


class ShortProfiler(SimpleProfiler):
    """Lightning's `SimpleProfiler`, limited to the actions that took the most time.

    Actions are nested (`run_training_epoch` contains a whole epoch), so the percentages do not add up to 100. With any
    profiler, Lightning's own loop runs instead of the lean one, which adds about 0.2 ms per step.

    Args:
        num_rows: maximum number of actions to list, those with the largest totals.
    """

    def __init__(self, num_rows: int = 20) -> None:
        super().__init__()
        self.num_rows = num_rows

    @override
    def summary(self) -> str:
        totals = [(sum(seconds), len(seconds), name) for name, seconds in self.recorded_durations.items()]
        whole = time.monotonic() - self.start_time
        rows = [
            f"{total:>9.3f}  {total / whole:>6.1%}  {count:>6,}  {total / count * 1000:>9.3f}  {name}"
            for total, count, name in sorted(totals, reverse=True)[: self.num_rows]
            if total > TRIVIAL_PART * whole
        ]
        head = f"{'seconds':>9}  {'part':>6}  {'calls':>6}  {'ms a call':>9}  action"
        return "\n".join(["", head, *rows, f"{len(totals) - len(rows)} other actions are not shown.", ""])
