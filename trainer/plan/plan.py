"""Compute the memory that each device would need, without using one (`mode=plan`)."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.strategies import Strategy
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ...strategies import ConfigError
from ...strategies.core.patching import LIGHTNING_TELLS, filtered
from ...strategies.fsdp import FSDPStrategy
from ...strategies.model_parallel import ModelParallelStrategy
from ...strategies.ranks.shard_sync import part_names
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import recompute_of
from ..config.instantiate import instantiate, module_and_data, quiet_trainer
from ..job.log_file import run_log
from ..job.result import write_json
from ..job.summary import new_table, show
from ._search import MemoryPlan, questions
from ._simulation import Finished, Questions, SimulatedStrategy
from ._topology import Shards, Topology, count_devices, is_for_accelerator, topology_of, workspace_bytes

GB = 10**9
UNITS = (("GB", GB), ("MB", 10**6), ("kB", 10**3))

UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

Ask = Callable[[int], Questions[MemoryPlan]]
"""Creates the questions from the number of samples of the loader's batch."""


def plan_memory(cfg: DictConfig) -> MemoryPlan:
    """Compute the memory of each device for the configured strategy. Devices are not used and need not exist.

    Returns:
        The plan, also written as `plan.json` into the run directory.

    Raises:
        ConfigError: the strategy, or an operation of the training step, is not supported.
    """
    limit = cfg.get("device_memory_gb")
    with run_log(cfg.run_dir):
        strategy: Strategy = instantiate("strategy", cfg.strategy)
        topology = topology_of(strategy, count_devices(cfg), int(cfg.num_nodes))
        topology = replace(topology, workspace=workspace_bytes(cfg))
        most = limit and limit * GB
        found = interview(cfg, strategy, topology, lambda batch: questions(topology, batch, most))
    write_json(found, Path(cfg.run_dir) / "plan.json")
    return found


def interview(cfg: DictConfig, strategy: Strategy, topology: Topology, ask: Ask) -> MemoryPlan:
    """Run a simulated training that answers questions, which depend on the samples of the loader's batch."""
    options = strategy.stage_options if isinstance(strategy, (ModelParallelStrategy, RankStrategy)) else None
    pl.seed_everything(cfg.seed or 0, workers=True, verbose=False)  # the first batch is the same as in a run
    simulated = SimulatedStrategy(
        ask, topology.num_stages, options, is_for_accelerator(cfg), recompute_of(strategy),
        shards_of(strategy, topology, cfg), topology.num_owners,
    )  # fmt: skip
    module, data = module_and_data(cfg)
    try:
        # messages about a simulated trainer, such as unused GPUs, would mislead
        with filtered(LIGHTNING_TELLS, lambda record: record.levelno >= logging.WARNING):
            looks = LambdaCallback(on_train_batch_end=lambda *_: None)  # pyright: ignore  # as a run's, which get outputs
            quiet_trainer(cfg, simulated, callbacks=[looks], **one_device(cfg)).fit(module, datamodule=data)
    except Finished as answered:
        return answered.value
    except UNREADABLE as exc:
        raise ConfigError(
            f"mode=plan runs training_step with shapes only, but it reads values ({str(exc).splitlines()[0]}). "
            "Use mode=compare, which measures."
        ) from exc
    raise AssertionError("the training ended before the questions were answered")


def shards_of(strategy: Strategy, topology: Topology, cfg: DictConfig) -> Callable[[nn.Module], Shards] | None:
    """What computes the shards of a module; None if every rank holds the whole."""
    if not isinstance(strategy, FSDPStrategy):
        return None
    options, accumulates = strategy.shards, int(cfg.trainer.get("accumulate_grad_batches") or 1) > 1
    keeps, num = not options.reshard_after_forward, topology.num_shards
    return lambda module: Shards.of(module, part_names(module, options.shard), num, keeps, accumulates)


def one_device(cfg: DictConfig) -> dict[str, Any]:
    """The trainer's options for a simulated run."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "num_nodes": 1,
        # the same number of bytes; the CPU has no fp16 scaler
        "precision": "bf16-mixed" if str(cfg.precision) == "16-mixed" else str(cfg.precision),
        "max_steps": -1,
        "min_epochs": None,
        "limit_train_batches": None,
        "val_check_interval": 1.0,
        "overfit_batches": 0,
        "fast_dev_run": False,
        # from the second batch on, gradients exist in forward; further batches add no memory
        "accumulate_grad_batches": min(int(cfg.trainer.get("accumulate_grad_batches") or 1), 2),
    }


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
    show(table, conclusions(plan))


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
