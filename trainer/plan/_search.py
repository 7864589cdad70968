"""Compute the memory plan of every device and the largest batch that fits from simulated steps."""

from dataclasses import dataclass, replace

from ...strategies.pipeline.schedule import most_in_flight
from ._simulation import Questions
from ._topology import StageMemory, Topology, in_flight, with_owner

MAX_SAMPLES = 2**24
"""Upper limit of the search, in samples."""


MANY_GUESSES = 12
"""Number of linear guesses before bisection takes over, since memory is not linear then."""


@dataclass(frozen=True)
class DevicePlan:
    """Bytes that one device needs.

    Args:
        samples: samples of its chunk.
        activations: tensors that forward saves for backward.
        communication: buffers for gradients sent between devices.
        peak: largest number of bytes at one time. Not all of the above need exist at that time, and temporaries add
            to it.
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
    """The outcome of `mode=plan`.

    Args:
        loader_batch: samples of a batch of the loader.
        global_batch: samples of an optimizer step's forward over all processes.
        devices: one plan per device of a node.
        device_bytes: memory of a device; None if it was not given.
        largest_batch: samples of the largest batch of the loader that fits: 0 if a single sample does not fit; None if
            no memory size was given or any batch fits.
    """

    strategy: str
    loader_batch: int
    global_batch: int
    devices: list[DevicePlan]
    device_bytes: float | None = None
    largest_batch: int | None = None

    @property
    def peak(self) -> int:
        """Largest peak of all devices, in bytes."""
        return max(device.peak for device in self.devices)


def questions(topology: Topology, batch: int, device_bytes: float | None) -> Questions[MemoryPlan]:
    """Request the simulated steps that a plan needs; the largest batch is searched for if memory is given."""
    known: dict[int, list[StageMemory]] = {}
    devices = yield from planned(topology, batch, known)
    largest = None
    if device_bytes is not None:
        largest = yield from largest_batch(topology, batch, device_bytes, known)
    return MemoryPlan(topology.name, batch, topology.global_batch(batch), devices, device_bytes, largest)


def planned(topology: Topology, batch: int, known: dict[int, list[StageMemory]]) -> Questions[list[DevicePlan]]:
    """Plan every device of a node, in order, for a batch of the loader.

    Args:
        known: the memory per stage of steps with so many samples; those that it lacks are requested.
    """
    sizes = topology.samples(batch)
    for samples in map(topology.simulated, sizes):
        if samples and samples not in known:
            known[samples] = yield samples
    idle = [without_samples(memory) for memory in next(iter(known.values()))]
    plans: list[DevicePlan] = []
    for copy, samples in enumerate(sizes):
        for memory in memory_of(topology, samples, known) if samples else idle:
            if topology.num_owners > 1:
                memory = with_owner(memory, copy)
            if not topology.is_replicated:
                buckets = topology.buckets * memory.gradients
                plans.append(device_plan(memory, len(plans), samples, buckets + memory.gathered, memory.peak + buckets))
            elif copy:
                plans.append(replica(memory, len(plans), samples))
            else:  # the root holds the optimizer, and receives the other replicas' gradients
                received = sum(size > 0 for size in sizes[1:]) * memory.gradients
                peak = max(memory.peak, memory.static + memory.batch + received)
                plans.append(device_plan(memory, 0, samples, received, peak))
    return [replace(plan, peak=plan.peak + topology.workspace) for plan in plans]


def memory_of(topology: Topology, samples: int, known: dict[int, list[StageMemory]]) -> list[StageMemory]:
    """The memory, per stage, of a copy of the module that has this many samples."""
    simulated = topology.simulated(samples)
    num = -(-samples // simulated)
    if num == 1:
        return known[simulated]
    return in_flight(known[simulated], most_in_flight(topology.schedule, num, topology.num_stages), samples, simulated)


def without_samples(memory: StageMemory) -> StageMemory:
    """The memory of a device without samples, which only holds the module and its optimizer."""
    peaks = dict.fromkeys(("forward_peak", "backward_peak"), memory.static)
    return replace(memory, batch=0, activations=0, update_peak=memory.static + memory.update_extra, **peaks)


def device_plan(memory: StageMemory, device: int, samples: int, communication: int, peak: int) -> DevicePlan:
    """A device's plan with what its memory and the plan name alike."""
    alike = (getattr(memory, name) for name in ("parameters", "gradients", "optimizer", "batch", "activations"))
    return DevicePlan(device, samples, *alike, communication=communication, peak=peak)


def replica(memory: StageMemory, device: int, samples: int) -> DevicePlan:
    """Plan another replica's device: it has no optimizer, and frees its gradients after each backward pass."""
    if not samples:
        return DevicePlan(device, 0, memory.parameters, peak=memory.parameters)
    forward = memory.forward_peak - memory.optimizer - memory.gradients
    peak = max(forward, memory.backward_peak - memory.optimizer)
    return device_plan(replace(memory, optimizer=0), device, samples, 0, peak)


def largest_batch(
    topology: Topology, batch: int, device_bytes: float, known: dict[int, list[StageMemory]]
) -> Questions[int | None]:
    """Find the largest batch of the loader that fits every device: 0 if no sample does, None if any number does.

    Memory grows about linearly with samples, so each guess interpolates between known sizes. The result is confirmed by
    a step that fits and a step with one more sample that does not.
    """
    peaks: dict[int, int] = {}
    fits, fails, guess = 0, MAX_SAMPLES + 1, batch
    while fails - fits > 1:
        plans = yield from planned(topology, guess, known)
        peaks[guess] = max(plan.peak for plan in plans)
        fits, fails = (guess, fails) if peaks[guess] <= device_bytes else (fits, guess)
        guess = next_guess(peaks, fits, fails, device_bytes)
    return None if fits == MAX_SAMPLES else fits


def next_guess(peaks: dict[int, int], fits: int, fails: int, limit: float) -> int:
    """The next size to try, strictly between a batch that fits and one that does not."""
    guess = (fits + fails) // 2
    if len(peaks) == 1:
        guess = 2 * next(iter(peaks))
    elif len(peaks) <= MANY_GUESSES:
        (n, size), (m, other) = sorted(peaks.items(), key=lambda point: abs(point[1] - limit))[:2]
        slope = (other - size) / (m - n)
        guess = int(n + (limit - size) / slope) if slope > 0 else guess
    return min(max(guess, fits + 1), max(fits + 1, fails - 1))
