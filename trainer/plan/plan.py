"""Compute the memory that each device would need, without using one (`mode=plan`)."""

import logging
from dataclasses import dataclass, fields, replace
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
from ..config.checks import instantiate, module_and_data, quiet_trainer
from ..job.log_file import run_log
from ..job.result import new_table, print_table, write_json
from ._simulation import Finished, Questions, SimulatedStrategy
from ._topology import StageMemory, Topology, in_flight, is_for_accelerator, topology_of

GB = 10**9

MAX_SAMPLES = 2**24
"""Upper limit of the search, in samples."""


@dataclass(frozen=True)
class DevicePlan:
    """Bytes that one device needs for its `samples`; they need not all exist at the peak, to which temporaries add."""

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
    """The outcome of `mode=plan`, also in `plan.json`; `largest_batch` of the loader is 0 if no sample fits into
    `device_bytes`, and None if any batch does, or none were given.
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

    def show(self) -> None:
        """Print the memory of each device, and the largest batch that fits."""
        ranks = self.global_batch // self.loader_batch
        batch = f"{self.global_batch}" if ranks == 1 else f"{self.global_batch} = {ranks} ranks × {self.loader_batch}"
        title = f"plan: strategy={self.strategy}, global batch {batch} samples"
        cells = [each.name for each in fields(DevicePlan)[1:]]
        table = new_table(title, ("device", *cells))
        for amounts, alike in groupby(self.devices, key=lambda device: [getattr(device, cell) for cell in cells]):
            first, *others = (device.device for device in alike)
            name = f"{first} to {others[-1]}" if others else str(first)
            table.add_row(name, str(amounts[0]), *map(size_text, amounts[1:]))
        print_table(table, self.conclusions())

    def conclusions(self) -> list[str]:
        """Say whether the plan fits, and the largest batch that does."""
        if self.device_bytes is None:
            return ["Set device_memory_gb to find the largest batch that fits."]
        room = size_text(self.device_bytes)
        fits = "fits" if self.peak <= self.device_bytes else "does not fit"
        line = f"This {fits} {room}: the largest peak of a device is {size_text(self.peak)}."
        if self.peak > self.device_bytes:
            line += " strategy.recompute=except_last, fsdp and model_parallel need less per device."
        if self.largest_batch is None:
            return [line, f"Any batch fits {room}."]
        if not self.largest_batch:
            return [line, f"A batch of one sample does not fit {room}: the module is too large for this strategy."]
        return [line, f"The largest batch of the loader that fits {room}: {self.largest_batch:,} samples."]


def size_text(size: float) -> str:
    """Format bytes with three digits and a unit: 1.23 GB is 1.23 * 10^9 bytes."""
    for unit, factor in (("GB", GB), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.{max(0, 3 - len(str(int(size / factor))))}f} {unit}"
    return f"{size:.0f} B"


def plan_memory(cfg: DictConfig) -> MemoryPlan:
    """Compute the memory of each device for the configured strategy, and write it as `plan.json`."""
    limit = cfg.get("device_memory_gb")
    with run_log(cfg.run_dir):
        topology = topology_of(instantiate("strategy", cfg.strategy), cfg)
        ask = partial(Planner(topology).plan, device_bytes=limit and limit * GB)
        pl.seed_everything(cfg.seed or 0, workers=True, verbose=False)  # the first batch is the same as in a run
        found = interviewed(cfg, SimulatedStrategy(ask, topology, is_for_accelerator(cfg)))
    write_json(found, Path(cfg.run_dir) / "plan.json")
    return found


def interviewed(cfg: DictConfig, simulated: SimulatedStrategy) -> MemoryPlan:
    """The answer to the questions of a simulated training."""
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "num_nodes": 1, "max_steps": -1, "min_epochs": None,
        "limit_train_batches": None, "val_check_interval": 1.0, "overfit_batches": 0, "fast_dev_run": False,
        # the same number of bytes; the CPU has no fp16 scaler
        "precision": "bf16-mixed" if str(cfg.precision) == "16-mixed" else str(cfg.precision),
        # from the second batch on, gradients exist in forward; further batches add no memory
        "accumulate_grad_batches": min(int(cfg.trainer.get("accumulate_grad_batches") or 1), 2),
        "exact_accumulation": False,  # which looks at samples, whose tensors have no values here
        "callbacks": [LambdaCallback(on_train_batch_end=lambda *_: None)],  # pyright: ignore  # gets outputs, as a run's
    }  # fmt: skip
    module, data = module_and_data(cfg)
    try:
        # messages about a simulated trainer, such as unused GPUs, would mislead
        with filtered(LIGHTNING_TELLS, lambda record: record.levelno >= logging.WARNING):
            quiet_trainer(cfg, simulated, **options).fit(module, datamodule=data)
    except Finished as answered:
        return answered.args[0]
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as exc:
        raise ConfigError(
            f"mode=plan runs training_step with shapes only, but it reads values ({str(exc).splitlines()[0]}). "
            "Use mode=compare, which measures."
        ) from exc
    raise AssertionError("the training ended before the questions were answered")


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
        for samples in filter(None, map(self._simulated, sizes)):
            if samples not in self._known:
                self._known[samples] = yield samples
        plans: list[DevicePlan] = []
        for copy, samples in enumerate(sizes):
            for memory in self._memory_of(samples):
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

    def _simulated(self, samples: int) -> int:
        """Samples of the step to simulate, for a copy of the module that has this many: those of a micro-batch."""
        return -(-samples // self.topology.stages.num_microbatches)

    def _memory_of(self, samples: int) -> list[StageMemory]:
        """The memory, per stage, of a copy of the module that has this many samples."""
        if not samples:  # it only holds the module and its optimizer
            known = next(iter(self._known.values()))
            return [replace(memory, batch=0, activations=0, forward=0, backward=0) for memory in known]
        simulated = self._simulated(samples)
        if (num := -(-samples // simulated)) == 1:
            return self._known[simulated]
        most = self.topology.stages.most_in_flight(num, self.topology.num_stages)
        return in_flight(self._known[simulated], most, samples, simulated)

    def largest_batch(self, batch: int, device_bytes: float) -> Questions:
        """Return the largest batch that fits every device: 0 if no sample does, None if any number does."""
        fits, fails = 0, MAX_SAMPLES + 1
        while fails - fits > 1:
            guess = (fits + fails) // 2 if fails <= MAX_SAMPLES else min(max(batch, 2 * fits), MAX_SAMPLES)
            plans = yield from self.devices(guess)
            is_fit = max(plan.peak for plan in plans) <= device_bytes
            fits, fails = (guess, fails) if is_fit else (fits, guess)
        return None if fits == MAX_SAMPLES else fits
