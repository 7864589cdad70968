"""From the memory of simulated steps to a plan of every device, and to the largest batch that fits."""

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from ._simulation import Questions, StageMemory
from ._topology import Topology

MAX_SAMPLES = 2**24
"""Batches beyond this are not looked for."""


MANY_GUESSES = 12
"""Guesses along a line after which halving takes over: memory is no line then."""


@dataclass(frozen=True)
class DevicePlan:
    """Bytes that one device needs.

    Args:
        device: number of the device on its node.
        samples: samples of its part of a batch.
        parameters: parameters and buffers.
        gradients: gradients of the parameters.
        optimizer: state of the optimizers.
        batch: its part of the batch.
        activations: what forward leaves for backward.
        communication: buffers for gradients on their way between devices.
        peak: most bytes at one time. Not everything above need be there at that time, and temporaries come on top.
    """

    device: int
    samples: int
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    batch: int = 0
    activations: int = 0
    communication: int = 0
    peak: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What `mode=plan` found out.

    Args:
        strategy: its name.
        loader_batch: samples of a batch of the loader.
        global_batch: samples of an optimizer step's forward over all processes.
        devices: one plan per device of a node.
        device_bytes: memory of a device; None where it was not given.
        largest_batch: samples of the largest batch of the loader that fits it: 0 where not even one sample does;
            None where nothing was to fit, or any batch does.
    """

    strategy: str
    loader_batch: int
    global_batch: int
    devices: list[DevicePlan]
    device_bytes: float | None = None
    largest_batch: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of the fullest device."""
        return max(device.peak for device in self.devices)

    def write(self, run_dir: str | Path) -> Path:
        """Write `plan.json` into the run directory; returns its path."""
        path = Path(run_dir) / "plan.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path


def questions(spread: Topology, batch: int, device_bytes: float | None) -> Questions[MemoryPlan]:
    """Ask for what a plan needs.

    Args:
        spread: how the strategy spreads its work.
        batch: samples of the loader's batch.
        device_bytes: memory of a device; None does not look for the largest batch.

    Returns:
        The plan.
    """
    known: dict[int, list[StageMemory]] = {}
    devices = yield from planned(spread, batch, known)
    largest = None
    if device_bytes is not None:
        largest = yield from largest_batch(spread, batch, device_bytes, known)
    return MemoryPlan(spread.name, batch, spread.global_batch(batch), devices, device_bytes, largest)


def planned(spread: Topology, batch: int, known: dict[int, list[StageMemory]]) -> Questions[list[DevicePlan]]:
    """Plan every device for a batch of the loader, asking for sizes that are not known yet."""
    for samples in spread.samples(batch):
        if samples and samples not in known:
            known[samples] = yield samples
    return device_plans(spread, batch, known)


def device_plans(spread: Topology, batch: int, known: dict[int, list[StageMemory]]) -> list[DevicePlan]:
    """Plan every device of a node.

    Args:
        spread: how the strategy spreads its work.
        batch: samples of the loader's batch.
        known: memory by stage of a step of one copy of the module, by its number of samples.

    Returns:
        One plan per device, in order.
    """
    sizes = spread.samples(batch)
    idle = [without_samples(memory) for memory in next(iter(known.values()))]
    plans: list[DevicePlan] = []
    for copy, samples in enumerate(sizes):
        for memory in known[samples] if samples else idle:
            if not spread.is_replicated:
                plans.append(whole(memory, len(plans), samples, spread.buckets * memory.gradients))
            elif copy:
                plans.append(replica(memory, len(plans), samples))
            else:
                senders = sum(size > 0 for size in sizes[1:])
                plans.append(root(memory, samples, senders * memory.gradients))
    return plans


def without_samples(memory: StageMemory) -> StageMemory:
    """What remains of a step's memory where a device has no sample: it only hosts the module and its optimizer."""
    static = memory.parameters + memory.gradients + memory.optimizer
    return StageMemory(
        memory.parameters, memory.gradients, memory.optimizer, 0, 0, static, static, static + update_extra(memory)
    )


def update_extra(memory: StageMemory) -> int:
    """Temporaries of the optimizer's update."""
    return max(0, memory.update_peak - memory.parameters - memory.gradients - memory.optimizer - memory.batch)


def whole(memory: StageMemory, device: int, samples: int, buckets: int) -> DevicePlan:
    """Plan a device that trains a module, or a stage of it, with an optimizer of its own."""
    peak = max(memory.forward_peak, memory.backward_peak, memory.update_peak) + buckets
    return DevicePlan(
        device, samples, memory.parameters, memory.gradients, memory.optimizer, memory.batch, memory.activations,
        buckets, peak,
    )  # fmt: skip


def root(memory: StageMemory, samples: int, received: int) -> DevicePlan:
    """Plan the first device of replicas: it holds the optimizer, and receives the other replicas' gradients."""
    meeting = memory.parameters + memory.gradients + memory.optimizer + memory.batch + received
    peak = max(memory.forward_peak, memory.backward_peak, memory.update_peak, meeting)
    return DevicePlan(
        0, samples, memory.parameters, memory.gradients, memory.optimizer, memory.batch, memory.activations,
        received, peak,
    )  # fmt: skip


def replica(memory: StageMemory, device: int, samples: int) -> DevicePlan:
    """Plan another replica: it has no optimizer, and its gradients leave it after each backward pass."""
    if not samples:
        return DevicePlan(device, 0, memory.parameters, peak=memory.parameters)
    forward = memory.forward_peak - memory.optimizer - memory.gradients
    peak = max(forward, memory.backward_peak - memory.optimizer)
    return DevicePlan(
        device, samples, memory.parameters, memory.gradients, 0, memory.batch, memory.activations, 0, peak
    )


def largest_batch(
    spread: Topology, batch: int, device_bytes: float, known: dict[int, list[StageMemory]]
) -> Questions[int | None]:
    """Look for the largest batch of the loader with which no device needs more than it has.

    Memory grows about linearly with samples, so each guess is a line through what is known; every answer is confirmed
    by a step that fits and a step with one more sample that does not.

    Returns:
        Samples; 0 where not even one fits, None where any number does.
    """
    peaks: dict[int, int] = {}

    def peak(samples: int) -> Generator[int, list[StageMemory], int]:
        plans = yield from planned(spread, samples, known)
        peaks[samples] = max(plan.peak for plan in plans)
        return peaks[samples]

    fits, fails = 0, MAX_SAMPLES + 1
    guess = batch
    while fails - fits > 1:
        if (yield from peak(guess)) <= device_bytes:
            fits = guess
        else:
            fails = guess
        guess = next_guess(peaks, fits, fails, device_bytes)
    return None if fits == MAX_SAMPLES else fits


def next_guess(peaks: dict[int, int], fits: int, fails: int, limit: float) -> int:
    """Where to look next, strictly between a batch that fits and one that does not."""
    points = sorted(peaks.items(), key=lambda point: abs(point[1] - limit))[:2]
    if len(points) == 1:
        guess = 2 * points[0][0]
    else:
        (n, size), (m, other) = points
        slope = (other - size) / (m - n)
        guess = int(n + (limit - size) / slope) if slope > 0 else (fits + fails) // 2
    if len(peaks) > MANY_GUESSES:
        guess = (fits + fails) // 2
    return min(max(guess, fits + 1), max(fits + 1, fails - 1))
