"""Record a trace of some steps with torch's profiler, and draw a pipeline's stages in it above their schedule."""

import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning.profilers import Profiler
from torch import profiler
from typing_extensions import override

from ..strategies.pipeline.schedule import timeline


class TraceProfiler(Profiler):
    """Record some training steps with torch's profiler: operators, kernels, memory and the actions of the loop.

    Every rank writes `trace.json` (rank 0) or `trace_rank<n>.json`, which https://ui.perfetto.dev shows, and on CUDA
    `memory.pickle`, which https://pytorch.org/memory_viz shows. Stages of a pipeline are drawn in `timeline.png`.

    Args:
        dirpath: directory of the files.
        num_steps: number of training batches to record.
        warmup_steps: number of batches before.
    """

    def __init__(self, dirpath: str | Path, num_steps: int = 5, warmup_steps: int = 5) -> None:
        super().__init__()
        self.folder, self.num_steps, self.warmup_steps = Path(dirpath), num_steps, warmup_steps
        self._recorded = 0
        self._profile: profiler.profile | None = None
        self._open: dict[str, profiler.record_function] = {}

    @override
    def start(self, action_name: str) -> None:
        if action_name == "run_training_batch":
            self._recorded += 1
            if self._recorded == self.warmup_steps + 1:
                self._begin()
        if self._profile is not None:
            self._open[action_name] = profiler.record_function(action_name)
            self._open[action_name].__enter__()

    @override
    def stop(self, action_name: str) -> None:
        if action_name in self._open:
            self._open.pop(action_name).__exit__(None, None, None)
        if action_name == "run_training_batch" and self._recorded >= self.warmup_steps + self.num_steps:
            self._end()

    @override
    def teardown(self, stage: str | None) -> None:
        self._end()
        super().teardown(stage)

    def _begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
        self._profile = profiler.profile(profile_memory=True, record_shapes=True)
        self._profile.start()

    def _end(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        rank = int(os.environ.get("RANK", "0"))
        suffix = f"_rank{rank}" if rank else ""
        trace = self.folder / f"trace{suffix}.json"
        self._profile.export_chrome_trace(str(trace))
        draw_stages(trace, self.folder / f"timeline{suffix}.png")
        self._profile = None
        self._open.clear()
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory{suffix}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


INK = "#1f2328"
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bc4c00", "#0a7ea4", "#57606a")

WIDTH, LEFT, ROW, TOP = 1200, 100, 30, 40
"""Pixels: of the picture, of the names at its left, of a row, and of a title."""

TASK = re.compile(r"([FB])(\d+)(?: stage (\d+))?$")
BACKWARD = re.compile(r"\[Strategy\]\w+\.backward$")
"""What strategies name the tasks of micro-batches in a trace, and what the loop names the last backward pass."""


class Box(NamedTuple):
    """A task in a row: its phase, `F` or `B`, and its micro-batch, with its start and end in any unit."""

    phase: str
    microbatch: int
    start: float
    end: float


def draw_stages(trace: Path, picture: Path) -> None:
    """Draw the last step of a trace; does nothing for a step without stages, or without Pillow.

    Rows are devices where the trace has their own times (CUDA). Else they are stages by the clock of the thread that
    runs them, one task after the other; a backward pass goes through all stages.

    Args:
        trace: a file of torch's profiler, in Chrome's format.
        picture: the file to write (png).
    """
    text = trace.read_text(encoding="utf-8")
    if '"F0' not in text or importlib.util.find_spec("PIL") is None:  # a large trace takes seconds to parse
        return
    rows, unit = read_rows(json.loads(text)["traceEvents"])
    if len(rows) < 2:
        return
    boxes = [box for row in rows.values() for box in row]
    last_forward = max(box.start for box in boxes if box.phase == "F")
    name = "1f1b" if any(box.phase == "B" and box.start < last_forward for box in boxes) else "gpipe"
    scheduled: dict[str, list[Box]] = {}
    for tick, tasks in enumerate(timeline(name, 1 + max(box.microbatch for box in boxes), len(rows))):
        for task in tasks:
            scheduled.setdefault(f"stage {task.stage}", []).append(Box(task.phase, task.microbatch, tick, tick + 1))
    draw_boxes(picture, {f"as measured, {unit}": rows, f"schedule {name}, in tasks of equal length": scheduled})


def read_rows(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Box]], str]:
    """Read the tasks of the last step of a trace by row, and what the unit of their times is called."""
    marks = [event for event in events if event.get("ph") == "X"]
    host = [event for event in marks if event.get("cat") == "user_annotation"]
    start = max((event["ts"] for event in host if event["name"] == "run_training_batch"), default=0.0)
    on_devices = [event for event in marks if event.get("cat") == "gpu_user_annotation" and event["ts"] >= start]
    shown = on_devices or [event for event in host if event["ts"] >= start]
    found = [(event, TASK.match(event["name"])) for event in shown]
    forward = [int(match[2]) for _, match in found if match and match[1] == "F"]
    stages = sorted({int(match[3]) for _, match in found if match and match[3]})
    rows: dict[str, list[Box]] = {}
    for event, match in found:
        is_last = bool(forward) and BACKWARD.match(event["name"])
        if not (match or is_last):
            continue
        phase, number = (match[1], int(match[2])) if match else ("B", max(forward))
        box = Box(phase, number, (event["ts"] - start) / 1000, (event["ts"] + event["dur"] - start) / 1000)
        own = [f"stage {match[3]}"] if match and match[3] else [f"stage {stage}" for stage in stages]
        for row in [f"device {event['pid']}"] if on_devices else own:
            rows.setdefault(row, []).append(box)
    return dict(sorted(rows.items())), "ms of devices" if on_devices else "ms of the host"


def draw_boxes(path: Path, panels: Mapping[str, Mapping[str, Sequence[Box]]]) -> None:
    """Draw rows of boxes by panel, each panel on a time axis of its own from its first box to its last."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, sum(TOP + ROW * len(rows) for rows in panels.values()) + ROW), "white")
    pen, font, y = ImageDraw.Draw(image), ImageFont.load_default(13), 0
    for title, rows in panels.items():
        first = min(box.start for row in rows.values() for box in row)
        length = max(box.end for row in rows.values() for box in row) - first
        pen.text((LEFT, y + TOP - 10), f"{title}: {length:.4g}", INK, font, "ls")
        y += TOP
        for name, row in rows.items():
            pen.text((LEFT - 10, y + ROW / 2), name, INK, font, "rm")
            for phase, number, *times in row:
                left, right = [LEFT + (at - first) / length * (WIDTH - LEFT - 10) for at in times]
                colour, text = COLOURS[number % len(COLOURS)], f"{phase}{number}"
                ink, filled = ("white", colour) if phase == "F" else (INK, "white")
                pen.rectangle((left, y + 3, max(right - 1, left), y + ROW - 3), filled, colour)
                if pen.textlength(text, font) < right - left:
                    pen.text(((left + right) / 2, y + ROW / 2), text, ink, font, "mm")
            y += ROW
    image.save(path)
