"""What a command says, what a run left in its event file, and a module whose run fails."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tiny import Tiny

from evener.trainer import Result, main

SHORT = ["accelerator=cpu", "trainer.enable_model_summary=false", "test_after_fit=false"]
"""Overrides of a run for the tests of what people see: on the CPU, without what they do not look at."""


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Run the command line in this process; the sentence that it exits with, or an empty one."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    try:
        main()
    except SystemExit as exc:
        return "" if exc.code in (None, 0) else str(exc.code)
    return ""


def events(run: Result | Path) -> EventAccumulator:
    """Read the one event file of a run."""
    (file,) = Path(run.run_dir if isinstance(run, Result) else run).glob("events.out.tfevents.*")
    sizes = {"scalars": 0, "tensors": 0, "histograms": 0, "images": 0}
    accumulator = EventAccumulator(str(file), size_guidance=sizes)
    accumulator.Reload()
    return accumulator


def raw_points(folder: Path) -> list[tuple[str, int, float]]:
    """All points (tag, step, value) that event files have, each as often as it is there, in TensorBoard's order."""
    return [
        (value.tag, event.step, value.simple_value)
        for file in sorted(folder.rglob("events.out.tfevents.*"))
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.WhichOneof("value") == "simple_value"
    ]


class Failing(Tiny):
    """Logs its step's number, keeps those that it began, and fails at a step."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at
        self.begun: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.at:
            raise KeyError("enough")
        self.begun.append(self.trainer.global_step)
        self.log("index", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)
