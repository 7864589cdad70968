"""Follow runs of `launched.Numbered` batch by batch, and compare one that was disturbed with one that was not."""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Numbered
from launching import Run, running
from seen import raw_points

NUM_EPOCHS, BATCHES_PER_EPOCH = 6, 10
WORDS = [
    "module._target_=launched.Numbered", f"trainer.max_epochs={NUM_EPOCHS}", "devices=1", "checkpoint=interval",
    "checkpoint.interval_s=0", "logger=tensorboard", "trainer.log_every_n_steps=1",
]  # fmt: skip


def trained(record: Path) -> list[tuple[int, int, int, int, list[int]]]:
    """(attempt, pid, epoch, batch, samples) of every step begun so far."""
    lines = [line.split(maxsplit=4) for line in record.read_text().splitlines()] if record.exists() else []
    return [(int(a), int(b), int(c), int(d), json.loads(e)) for a, b, c, d, e in lines]


def wait_until(record: Path, condition: Any, machines: list[Run], timeout_s: float = 400) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition(trained(record)):
        outputs = "\n".join(run.output.read_text()[-3000:] for run in machines)
        assert all(run.process.poll() is None for run in machines), outputs
        assert time.monotonic() < deadline, outputs
        time.sleep(0.1)


def all_at(place: int, num: int) -> Any:
    """A condition: that many ranks have begun a batch, or a later one, and nobody the one after it."""
    return lambda lines: reached(lines) >= place and present(lines) == num


def reached(lines: list[Any]) -> int:
    """The batch, counted over all epochs, that was begun last; -1 before the first."""
    return lines[-1][2] * BATCHES_PER_EPOCH + lines[-1][3] if lines else -1


def present(lines: list[Any]) -> int:
    """Number of ranks of the last attempt that began the last batch."""
    if not lines:
        return 0
    last = (lines[-1][0], *lines[-1][2:4])
    return len({pid for attempt, pid, epoch, batch, _ in lines if (attempt, epoch, batch) == last})


def allow(folder: Path, number: int) -> None:
    """Let the run train up to a batch."""
    (folder / "gate.new").write_text(str(number))
    (folder / "gate.new").replace(folder / "gate")


def alone(stack: ExitStack, folder: Path) -> Run:
    """Start the run that is left alone."""
    folder.mkdir()
    words = [f"module.record={folder}/samples", f"log_dir={folder}/logs", "strategy=single_device", *WORDS]
    return stack.enter_context(running(folder, *words))


def verify_same(folder: Path, undisturbed: Path) -> None:
    """Compare samples, weights and the curve; there is one directory."""
    expected = samples_of(trained(undisturbed / "samples"))
    assert samples_of(trained(folder / "samples")) == expected
    for epoch in range(NUM_EPOCHS):
        ids = [i for place, samples in expected.items() if place[0] == epoch for i in samples]
        assert sorted(ids) == list(range(Numbered.NUM_SAMPLES))
    found, weights = (torch.load(at / "samples.weights", weights_only=True) for at in (folder, undisturbed))
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
    curve = curve_of(folder)
    assert [step for step, _ in curve] == list(range(NUM_EPOCHS * BATCHES_PER_EPOCH))
    assert [value for _, value in curve] == pytest.approx([value for _, value in curve_of(undisturbed)], rel=1e-5)


def samples_of(lines: list[Any]) -> dict[tuple[int, int], list[int]]:
    """The samples of every batch, in the last attempt that has trained on it."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for attempt, _, epoch, batch, ids in lines:
        attempts = found.setdefault((epoch, batch), {})
        attempts.setdefault(attempt, []).extend(ids)
    return {place: sorted(list(attempts.values())[-1]) for place, attempts in found.items()}


def curve_of(folder: Path) -> list[tuple[int, float]]:
    """The points in the event files of the only directory, each as often as it is there."""
    (directory,) = (folder / "logs").glob("*/*/*")
    return [(step, value) for tag, step, value in raw_points(directory) if tag == "val/loss"]
