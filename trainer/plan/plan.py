"""Compute the memory that each device would need, without using one (`mode=plan`)."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, open_dict
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
from ..study.compare import short_config
from ..study.trial import Trial, run_trial
from ._search import MemoryPlan, Tried, questions
from ._simulation import Finished, Questions, SimulatedStrategy
from ._topology import Shards, Topology, count_devices, is_for_accelerator, topology_of, workspace_bytes

MICROBATCHES = 4
"""Micro-batches per stage: more of them fill the stages better and are smaller, but each costs launches."""


def choices(cfg: DictConfig, given: Topology, batch: int) -> list[tuple[Tried, DictConfig]]:
    """List the ways to train, with their strategies, from cheap to expensive; the configured one is left out."""
    found: list[tuple[Tried, DictConfig]] = []
    for recompute in ("never", "except_last", "always"):
        for options, loader_batch in _spreads(given, batch, int(cfg.num_nodes)):
            strategy = _strategy(cfg, given.name, options)
            if "recompute" not in strategy or (not options and recompute == strategy.recompute):
                continue
            with open_dict(strategy):
                strategy.recompute = recompute
            shown = [f"{'' if key == 'strategy' else 'strategy.'}{key}={as_given(options[key])}" for key in options]
            chosen = shown if options and recompute == "never" else [*shown, f"strategy.recompute={recompute}"]
            found.append((Tried(tuple(chosen), loader_batch), strategy))
    return found


def _spreads(given: Topology, batch: int, num_nodes: int) -> Iterator[tuple[dict[str, object], int]]:
    """Ways to spread the work, without recomputing: options of a strategy, and the loader's batch."""
    devices, everywhere = given.num_devices, given.global_batch(batch)
    yield {}, batch
    if devices * num_nodes == 1:
        return
    if (given.num_ranks > 1 or given.is_replicated) and given.num_owners == 1 and given.num_shards == 1:
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


def _strategy(cfg: DictConfig, given: str, options: dict[str, object]) -> DictConfig:
    """The configuration of a strategy, with the user's other options where it is the configured one."""
    name = str(options.get("strategy", given))
    strategy = cfg.strategy.copy() if name == given else PACKAGE.options("strategy", name)
    with open_dict(strategy):
        strategy.update({key: value for key, value in options.items() if key != "strategy"})
    return strategy


GB = 10**9

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

        def ask(batch: int) -> Questions[MemoryPlan]:
            return questions(topology, batch, None if limit is None else limit * GB)

        found = interview(cfg, strategy, topology, ask)
        if limit is not None and found.peak > limit * GB:
            found = replace(found, tried=list(others(cfg, topology, found, limit * GB)))
    write_json(found, Path(cfg.run_dir) / "plan.json")
    return found


def others(cfg: DictConfig, given: Topology, plan: MemoryPlan, limit: float) -> Iterator[Tried]:
    """Plan other ways to train the same global batch, from cheap to expensive, up to the first that fits."""
    too_large: set[tuple[str, ...]] = set()
    for tried, options in choices(cfg, given, plan.loader_batch):
        spread = tuple(option for option in tried.options if not option.startswith("strategy.recompute="))
        if spread in too_large:
            continue  # to recompute activations takes nothing off the weights
        batch = tried.loader_batch
        try:
            strategy: Strategy = instantiate("strategy", options)
            topology = topology_of(strategy, given.num_devices, int(cfg.num_nodes))
            topology = replace(topology, workspace=given.workspace)
            planned = interview(cfg, strategy, topology, lambda _, t=topology, b=batch: questions(t, b, None))
        except ConfigError as exc:
            yield replace(tried, reason=str(exc))
            continue
        yield replace(tried, peak=planned.peak, fits=planned.peak <= limit)
        if planned.peak <= limit:
            return
        if max(d.parameters + d.gradients + d.optimizer for d in planned.devices) > limit:
            too_large.add(spread)


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
