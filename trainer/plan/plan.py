"""Compute the memory that each device would need, without using one (`mode=plan`)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning.callbacks import LambdaCallback
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ...strategies import ConfigError
from ...strategies.core.patching import LIGHTNING_TELLS, filtered
from ...strategies.pipeline.schedule import most_in_flight
from ..config.checks import instantiate, module_and_data, quiet_trainer
from ..job.log_file import run_log
from ..job.result import new_table, print_table, write_json
from ._simulation import Finished, Questions, SimulatedStrategy
from ._topology import StageMemory, Topology, in_flight, is_for_accelerator, topology_of, with_owner

GB = 10**9
UNITS = (("GB", GB), ("MB", 10**6), ("kB", 10**3))

MAX_SAMPLES = 2**24
"""Upper limit of the search, in samples."""

MANY_GUESSES = 12
"""Number of linear guesses before bisection takes over, since memory is not linear then."""

UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


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


def plan_memory(cfg: DictConfig) -> MemoryPlan:
    """Compute the memory of each device for the configured strategy, and write it as `plan.json`.

    Raises:
        ConfigError: the strategy, or an operation of the training step, is not supported.
    """
    limit = cfg.get("device_memory_gb")
    with run_log(cfg.run_dir):
        topology = topology_of(instantiate("strategy", cfg.strategy), cfg)
        found = interview(cfg, topology, partial(Planner(topology).plan, device_bytes=limit and limit * GB))
    write_json(found, Path(cfg.run_dir) / "plan.json")
    return found


def interview(cfg: DictConfig, topology: Topology, ask: Callable[[int], Questions]) -> MemoryPlan:
    """Run a simulated training that answers questions, which depend on the samples of the loader's batch."""
    pl.seed_everything(cfg.seed or 0, workers=True, verbose=False)  # the first batch is the same as in a run
    simulated = SimulatedStrategy(ask, topology, is_for_accelerator(cfg))
    module, data = module_and_data(cfg)
    try:
        # messages about a simulated trainer, such as unused GPUs, would mislead
        with filtered(LIGHTNING_TELLS, lambda record: record.levelno >= logging.WARNING):
            looks = LambdaCallback(on_train_batch_end=lambda *_: None)  # pyright: ignore  # as a run's, which get outputs
            quiet_trainer(cfg, simulated, callbacks=[looks], **one_device(cfg)).fit(module, datamodule=data)
    except Finished as answered:
        return answered.args[0]
    except UNREADABLE as exc:
        raise ConfigError(
            f"mode=plan runs training_step with shapes only, but it reads values ({str(exc).splitlines()[0]}). "
            "Use mode=compare, which measures."
        ) from exc
    raise AssertionError("the training ended before the questions were answered")


def one_device(cfg: DictConfig) -> dict[str, Any]:
    """The trainer's options for a simulated run."""
    return {
        "accelerator": "cpu", "devices": 1, "num_nodes": 1, "max_steps": -1, "min_epochs": None,
        "limit_train_batches": None, "val_check_interval": 1.0, "overfit_batches": 0, "fast_dev_run": False,
        # the same number of bytes; the CPU has no fp16 scaler
        "precision": "bf16-mixed" if str(cfg.precision) == "16-mixed" else str(cfg.precision),
        # from the second batch on, gradients exist in forward; further batches add no memory
        "accumulate_grad_batches": min(int(cfg.trainer.get("accumulate_grad_batches") or 1), 2),
        "exact_accumulation": False,  # which looks at samples, whose tensors have no values here
    }  # fmt: skip


class Planner:
    """Plans batches of the loader from simulated steps, each of which is requested once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._known: dict[int, list[StageMemory]] = {}

    def plan(self, batch: int, device_bytes: float | None) -> Questions:
        """Return the plan of a batch; the largest one is searched for if a device's memory is given."""
        devices = yield from self.devices(batch)
        largest = None if device_bytes is None else (yield from self.largest_batch(batch, device_bytes))
        return MemoryPlan(self.topology.name, batch, self.topology.global_batch(batch), devices, device_bytes, largest)

    def devices(self, batch: int) -> Questions:
        """Return the plan of every device of a node, in order."""
        topology, sizes = self.topology, self.topology.samples(batch)
        for samples in map(topology.simulated, sizes):
            if samples and samples not in self._known:
                self._known[samples] = yield samples
        idle = [memory.without_samples() for memory in next(iter(self._known.values()))]
        plans: list[DevicePlan] = []
        for copy, samples in enumerate(sizes):
            for memory in self._memory_of(samples) if samples else idle:
                if topology.num_owners > 1:
                    memory = with_owner(memory, copy)
                sent, peak = topology.buckets * memory.gradients, memory.peak
                if not topology.is_replicated:
                    sent, peak = sent + memory.gathered, peak + sent
                elif not copy:  # the root holds the optimizer, and receives the other replicas' gradients
                    sent = sum(size > 0 for size in sizes[1:]) * memory.gradients
                    peak = max(peak, memory.static + memory.batch + sent)
                else:
                    memory = memory.of_replica() if samples else StageMemory(memory.parameters)
                    peak = max(memory.peak, memory.parameters)
                held = (memory.parameters, memory.gradients, memory.optimizer, memory.batch, memory.activations)
                plans.append(DevicePlan(len(plans), samples, *held, sent, peak + topology.workspace))
        return plans

    def _memory_of(self, samples: int) -> list[StageMemory]:
        """The memory, per stage, of a copy of the module that has this many samples."""
        topology, simulated = self.topology, self.topology.simulated(samples)
        if (num := -(-samples // simulated)) == 1:
            return self._known[simulated]
        most = most_in_flight(topology.stages.schedule, num, topology.num_stages)
        return in_flight(self._known[simulated], most, samples, simulated)

    def largest_batch(self, batch: int, device_bytes: float) -> Questions:
        """Return the largest batch that fits every device: 0 if no sample does, None if any number does.

        Memory grows about linearly with samples, so each guess interpolates between known sizes. The result is
        confirmed by a step that fits and a step with one more sample that does not.
        """
        peaks: dict[int, int] = {}
        fits, fails, guess = 0, MAX_SAMPLES + 1, batch
        while fails - fits > 1:
            plans = yield from self.devices(guess)
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


COLUMNS = ("parameters", "gradients", "optimizer", "batch", "activations", "communication", "peak")
CELLS = ("samples", *COLUMNS)


def show_plan(plan: MemoryPlan) -> None:
    """Print the memory of each device, and the largest batch that fits."""
    ranks = plan.global_batch // plan.loader_batch
    batch = f"{plan.global_batch}" if ranks == 1 else f"{plan.global_batch} = {ranks} ranks × {plan.loader_batch}"
    title = f"plan: strategy={plan.strategy}, global batch {batch} samples"
    table = new_table(title, ("device", *CELLS))
    for amounts, alike in groupby(plan.devices, key=lambda device: [getattr(device, column) for column in CELLS]):
        first, *others = (device.device for device in alike)
        name = f"{first} to {others[-1]}" if others else str(first)
        table.add_row(name, str(amounts[0]), *map(size_text, amounts[1:]))
    print_table(table, conclusions(plan))


def conclusions(plan: MemoryPlan) -> list[str]:
    """Say whether the plan fits, and the largest batch that does."""
    if plan.device_bytes is None:
        return ["Set device_memory_gb to find the largest batch that fits."]
    room = size_text(plan.device_bytes)
    fits = "fits" if plan.peak <= plan.device_bytes else "does not fit"
    line = f"This {fits} {room}: the largest peak of a device is {size_text(plan.peak)}."
    if plan.peak > plan.device_bytes:
        line += " strategy.recompute=except_last, fsdp and model_parallel need less per device."
    if plan.largest_batch is None:
        return [line, f"Any batch fits {room}."]
    if not plan.largest_batch:
        return [line, f"A batch of one sample does not fit {room}: the module is too large for this strategy."]
    return [line, f"The largest batch of the loader that fits {room}: {plan.largest_batch:,} samples."]


def size_text(size: float) -> str:
    """Format bytes with three digits and a unit: 1.23 GB is 1.23 * 10^9 bytes."""
    for unit, factor in UNITS:
        if size >= factor:
            digits = max(0, 2 - (len(str(int(size / factor))) - 1))
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size:.0f} B"
