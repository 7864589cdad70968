"""What a run left in its event file, for the tests that read it back."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from evener.trainer import Result

SHORT = ["accelerator=cpu", "trainer.enable_model_summary=false", "test_after_fit=false"]
"""Overrides of a run for the tests of what people see: on the CPU, without what they do not look at."""


def events(result: Result) -> EventAccumulator:
    """Read the one event file of a run."""
    (file,) = Path(result.run_dir).glob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
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
