"""Compute the memory that each device would need, without using one (`mode=plan`)."""

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf, open_dict
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.strategies import Strategy
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ...strategies import ConfigError
from ...strategies.core.device_names import resolve_devices
from ...strategies.core.devices import is_accelerator
from ...strategies.core.options import as_given
from ...strategies.core.patching import LIGHTNING_TELLS, filtered
from ...strategies.fsdp import FSDPStrategy
from ...strategies.model_parallel import ModelParallelStrategy
from ...strategies.ranks.shard_sync import part_names
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import recompute_of
from ..config.checks import plain
from ..config.group_files import PACKAGE
from ..config.instantiate import instantiate, module_and_data, quiet_trainer
from ..job.log_file import run_log
from ..job.result import write_json
from ..job.summary import new_table, show
from ..study.compare import short_config
from ..study.trial import OK, Trial, run_trial
from ._search import MemoryPlan, Tried, questions
from ._simulation import Finished, Questions, SimulatedStrategy
from ._topology import Shards, Topology, count_devices, is_for_accelerator, topology_of, workspace_bytes

MICROBATCHES = 4
"""Micro-batches per stage: more of them fill the stages better and are smaller, but each costs launches."""


def _spreads(given: Topology, batch: int, num_nodes: int) -> Iterator[tuple[dict[str, object], int]]:
    """Ways to spread the work, without recomputing: options of a strategy, and the loader's batch."""
    devices, everywhere = given.num_devices, given.global_batch(batch)
    yield {}, batch
    if devices * num_nodes == 1:
        return
    if given.num_ranks > 1 and given.num_owners == given.num_shards == 1:
        yield {"shard_optimizer": True}, batch
    if given.num_shards == 1:
        per_rank = given.is_per_rank and given.num_ranks > 1 and given.num_stages == 1
        size_is = "per_device" if per_rank else "global"
        yield {"strategy": "fsdp", "batch_size_is": size_is}, batch if per_rank else everywhere
    for size in (size for size in range(2, devices + 1) if devices % size == 0 and everywhere >= size):
        num = max(1, min(MICROBATCHES * size, everywhere * size // (devices * num_nodes)))
        if size == devices and num_nodes == 1:
            yield {"strategy": "model_parallel", "num_microbatches": num}, everywhere
        else:
            options = {"strategy": "ddp_model_parallel", "model_parallel_size": size, "num_microbatches": num}
            yield {**options, "batch_size_is": "global"}, everywhere


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
        if most is not None and found.peak > most:
            found = replace(found, tried=list(others(cfg, topology, found, most)))
    write_json(found, Path(cfg.run_dir) / "plan.json")
    return found


def others(cfg: DictConfig, given: Topology, plan: MemoryPlan, limit: float) -> Iterator[Tried]:
    """Plan other ways to train the same global batch, from cheap to expensive, up to the first that fits."""
    too_large: list[dict[str, object]] = []
    spreads = list(_spreads(given, plan.loader_batch, int(cfg.num_nodes)))
    for recompute, (options, batch) in product(("never", "except_last", "always"), spreads):
        name = str(options.get("strategy", given.name))
        strategy: Any = (
            cfg.strategy.copy() if name == given.name else OmegaConf.create(PACKAGE.text(f"strategy/{name}"))
        )
        if "recompute" not in strategy or (not options and recompute == strategy.recompute) or options in too_large:
            continue  # to recompute activations takes nothing off the weights
        with open_dict(strategy):
            strategy.update({**{key: options[key] for key in options if key != "strategy"}, "recompute": recompute})
        shown = [f"{'' if key == 'strategy' else 'strategy.'}{key}={as_given(options[key])}" for key in options]
        recomputes = [] if options and recompute == "never" else [f"strategy.recompute={recompute}"]
        tried = Tried((*shown, *recomputes), batch)
        try:
            made: Strategy = instantiate("strategy", strategy)
            topology = replace(topology_of(made, given.num_devices, int(cfg.num_nodes)), workspace=given.workspace)
            planned = interview(cfg, made, topology, lambda _, t=topology, b=batch: questions(t, b, None))
        except ConfigError as exc:
            yield replace(tried, reason=str(exc))
            continue
        yield replace(tried, peak=planned.peak, fits=planned.peak <= limit)
        if planned.peak <= limit:
            return
        if max(d.parameters + d.gradients + d.optimizer for d in planned.devices) > limit:
            too_large.append(options)


def is_measured(cfg: DictConfig) -> bool:
    """Whether to compare the plan with a real run: if requested, or by default if accelerators are available."""
    wanted = (cfg.get("plan") or {}).get("measure", "auto")
    if wanted not in (True, False, "auto"):
        raise ConfigError(f"plan.measure={wanted} is unknown. Choose true, false or auto.")
    try:
        devices = resolve_devices(plain(cfg.devices), cfg.accelerator)
    except ConfigError:
        devices = []  # the planned devices are not on this machine
    return wanted is not False and bool(devices) and all(is_accelerator(device) for device in devices)


def measure(cfg: DictConfig, name: str) -> Trial:
    """Train a few steps on the devices, in separate processes; the peaks of an `ok` trial are in their order."""
    folder = Path(cfg.run_dir) / "measured"
    with run_log(cfg.run_dir):
        return run_trial(short_config(cfg, folder), name, cfg.compare.timeout_s)


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
    if plan.tried:
        show_tried(plan)


def show_tried(plan: MemoryPlan) -> None:
    """Print the other ways to train that were planned, and the command of the cheapest that fits."""
    headings = ("options", "loader's batch", "peak")
    table = new_table("the same global batch on the same devices, from cheap to expensive", headings, text=headings[:1])
    for tried in plan.tried:
        peak = "refused" if tried.peak is None else size_text(tried.peak)
        table.add_row(" ".join(tried.options), str(tried.loader_batch), peak)
    show(table, advice(plan, sys.argv))


REPLACED = ("mode=", "device_memory_gb=", "strategy=", "plan.")


def advice(plan: MemoryPlan, argv: Sequence[str]) -> list[str]:
    """Say what is the cheapest way that fits, with its command, made of this run's command line."""
    found = plan.cheapest
    if found is None:
        return ["None of these fits. Use more devices, a smaller batch, or a lower precision."]
    given = [argument for argument in argv[1:] if not argument.startswith(REPLACED)]
    if any(option.startswith("strategy=") for option in found.options):
        given = [argument for argument in given if not argument.startswith("strategy.")]
    else:
        own = [argument for argument in argv[1:] if argument.startswith("strategy=")]
        names = tuple(f"{option.partition('=')[0]}=" for option in found.options)
        given = [*own, *(argument for argument in given if not argument.startswith(names))]
    start = ["python", Path(argv[0]).name] if argv[0].endswith(".py") else [Path(argv[0]).name]
    lines = ["The cheapest that fits:", f"  {shlex.join([*start, *given, *found.options])}"]
    if found.loader_batch != plan.loader_batch:
        lines.append(f"Set the loader's batch to {found.loader_batch} samples for the same global batch.")
    return lines


def conclusions(plan: MemoryPlan) -> list[str]:
    """Say whether the plan fits, and the largest batch that does."""
    if plan.device_bytes is None:
        return ["Set device_memory_gb to find the largest batch that fits."]
    room = size_text(plan.device_bytes)
    fits = "fits" if plan.peak <= plan.device_bytes else "does not fit"
    line = f"This {fits} {room}: the largest peak of a device is {size_text(plan.peak)}."
    if plan.largest_batch is None:
        return [line, f"Any batch fits {room}."]
    if not plan.largest_batch:
        return [line, f"A batch of one sample does not fit {room}: the module is too large for this strategy."]
    return [line, f"The largest batch of the loader that fits {room}: {plan.largest_batch:,} samples."]


def measured_lines(plan: MemoryPlan, measured: Trial) -> list[str]:
    """Describe a plan's error relative to the measured peaks: planned / measured - 1."""
    if measured.status != OK:
        return [f"The measurement {measured.status}: {measured.reason}"]
    sizes = [mib * 2**20 for mib in measured.peak_memory_mib]
    if len(sizes) != len(plan.devices) or not all(sizes):
        return [f"{len(plan.devices)} devices were planned, and {len(sizes)} measured; no error is shown."]
    return [
        f"device {device.device}: planned {size_text(device.peak)}, measured {size_text(size)} "
        f"(error {device.peak / size - 1:+.1%})"
        for device, size in zip(plan.devices, sizes, strict=True)
    ]


def size_text(size: float) -> str:
    """Format bytes with three digits and a unit: 1.23 GB is 1.23 * 10^9 bytes."""
    for unit, factor in UNITS:
        if size >= factor:
            digits = max(0, 2 - (len(str(int(size / factor))) - 1))
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size:.0f} B"
