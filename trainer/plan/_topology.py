"""Describe how a strategy spreads a module and a batch over devices, and the memory of one in a simulated step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import DictConfig
from pytorch_lightning.strategies import Strategy
from torch import nn

from ...strategies import ConfigError, SingleDeviceStrategy
from ...strategies.batch.policies import Even, Policy
from ...strategies.core.devices import ALLOWED, accelerator_type, has_streams, num_available, resolve_devices
from ...strategies.distributed.store import num_processes
from ...strategies.dp import DataParallelStrategy
from ...strategies.fsdp import FSDPStrategy
from ...strategies.model_parallel import ModelParallelStrategy
from ...strategies.pipeline.recompute import RecomputeOption
from ...strategies.pipeline.stages import StageOptions
from ...strategies.ranks.shard_sync import part_names
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import name_of
from ...strategies.sharding.parts import ShardOptions
from ..config.checks import plain


@dataclass(frozen=True)
class Topology:
    """How a strategy spreads a batch of the loader over the devices of one node."""

    name: str
    num_devices: int
    num_stages: int = 1
    num_ranks: int = 1
    is_replicated: bool = False  # the devices of a process hold replicas, of which the first has the optimizer
    is_per_rank: bool = True  # each rank reads its own batch
    policy: Policy = field(default_factory=Even)
    buckets: int = 0  # copies of the gradients in DDP's buckets
    stages: StageOptions = field(default_factory=StageOptions)
    recompute: RecomputeOption = "never"
    num_shards: int = 1  # ranks that share all of the module
    shards: ShardOptions | None = None
    workspace: int = 0  # bytes of each device that its libraries keep

    def samples(self, batch: int) -> list[int]:
        """Samples per copy of the module on the first node, for a batch of the loader."""
        copies = self.num_devices // self.num_stages
        if self.is_replicated:
            return self.policy.sizes(batch, copies)
        return [batch] * copies if self.is_per_rank else self.policy.sizes(batch, self.num_ranks)[:copies]

    def global_batch(self, batch: int) -> int:
        """Samples over all processes, for a batch of the loader."""
        return batch * self.num_ranks if self.is_per_rank and not self.is_replicated else batch


def topology_of(strategy: Strategy, cfg: DictConfig) -> Topology:
    """Determine how a strategy that is not set up spreads its work, or refuse one that is not this project's."""
    name, num_devices = name_of(strategy), count_devices(cfg)
    stages = getattr(strategy, "stage_options", None) or StageOptions()
    workspace = workspace_bytes(cfg)
    recompute: Any = getattr(strategy, "recompute", None)
    option = "never" if recompute is None else recompute.option
    spread = Topology(name, num_devices, stages=stages, recompute=option, workspace=workspace)
    if isinstance(strategy, SingleDeviceStrategy):
        strategy.parallel_devices = [strategy.root_device] * num_devices
        return replace(spread, num_devices=1)
    if isinstance(strategy, DataParallelStrategy):
        refuse(name, submodule=strategy.replica_options.submodule)
        strategy.parallel_devices = [torch.device("cpu")] * num_devices
        strategy.policy.verify(num_devices, name)
        return replace(spread, is_replicated=True, policy=strategy.policy)
    if isinstance(strategy, ModelParallelStrategy):
        return replace(spread, num_stages=num_devices)
    if not isinstance(strategy, RankStrategy):
        raise ConfigError(f"mode=plan does not support the strategy {name}. Choose one of this project's, such as ddp.")
    num_stages = 1 if strategy.stage_options is None else strategy.devices_per_process
    num_ranks = num_processes(num_devices, num_stages) * int(cfg.num_nodes)
    is_per_rank, policy = strategy.batch_size_is == "per_device", strategy.balance.policy
    spread = replace(spread, num_stages=num_stages, num_ranks=num_ranks, is_per_rank=is_per_rank, policy=policy)
    if not isinstance(strategy, FSDPStrategy):
        refuse(name, shard_optimizer=strategy.shard_optimizer)
        return replace(spread, buckets=0 if strategy._ddp_kwargs.get("gradient_as_bucket_view") else 1)
    refuse(name, cpu_offload=strategy.shards.cpu_offload)
    if num_ranks % strategy.shards.replicas:
        raise ConfigError(f"fsdp: {num_ranks} ranks don't divide into replicas={strategy.shards.replicas} groups.")
    return replace(spread, num_shards=num_ranks // strategy.shards.replicas, shards=strategy.shards)


def refuse(strategy: str, **options: Any) -> None:
    """Refuse options for which memory is not computed."""
    for name in (name for name, value in options.items() if value):
        raise ConfigError(f"mode=plan does not support {strategy}.{name}. Use mode=compare, which measures.")


def count_devices(cfg: DictConfig) -> int:
    """Return the number of devices per node that `devices=` means; they need not exist unless it is `auto`."""
    devices = plain(cfg.devices)
    if str(devices) in ("auto", "-1"):
        return num_available(accelerator_type(cfg.accelerator))
    if isinstance(devices, list) or "," in str(devices):
        return len(devices if isinstance(devices, list) else str(devices).split(","))
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigError(f"devices={devices}: at least one device is needed. {ALLOWED}.")
    return int(devices)


def workspace_bytes(cfg: DictConfig) -> int:
    """Bytes that an accelerator's libraries keep of a matrix product: cuBLAS 32 MiB per thread; 0 without one here."""
    try:
        device = resolve_devices(plain(cfg.devices), cfg.accelerator)[0]
    except ConfigError:  # the planned devices are not on this machine
        return 0
    if not has_streams(device):
        return 0
    before = torch.accelerator.memory_allocated(device)
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()
    del matrix
    return torch.accelerator.memory_allocated(device) - before


def is_for_accelerator(cfg: DictConfig) -> bool:
    """Whether the plan is for accelerators, which need not exist on this machine."""
    devices = plain(cfg.devices)
    if isinstance(devices, list) and any(isinstance(device, str) for device in devices):
        return not all(str(device).startswith("cpu") for device in devices)
    return cfg.accelerator != "cpu" and (cfg.accelerator != "auto" or accelerator_type("auto") != "cpu")


@dataclass
class StageMemory:
    """Bytes on one device in a step that has an optimizer's state; those of phases go beyond `static` and batch."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    batch: int = 0
    activations: int = 0  # what the training step saves for its backward pass
    forward: int = 0
    backward: int = 0
    update: int = 0
    gathered: int = 0  # parameters of other ranks that are gathered at one time

    @property
    def static(self) -> int:
        """Bytes that are there whether or not a step runs."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Largest number of bytes at one time."""
        return self.static + self.batch + max(self.forward, self.backward, self.update)

    def of_replica(self) -> "StageMemory":
        """The memory of a replica: no optimizer; gradients are sent after each step, so that forward finds none."""
        return replace(self, optimizer=0, forward=self.forward - self.gradients, update=self.backward)


def sharded(memory: StageMemory, module: nn.Module, topology: Topology, accumulates: bool) -> StageMemory:
    """The memory of a rank with a shard of everything, of a step whose parameters and gradients were in no peak."""
    # parts are gathered one by one into a buffer, and from there into parameters, while the one before is still there;
    # in backward the next one's is there already, and two copies of gradients, added up before they are cut
    assert topology.shards is not None
    num, sizes = topology.num_shards, {id(p): p.nbytes for p in module.parameters()}
    cut = sum(-(-len(p) // num) * p.nbytes // max(len(p), 1) if p.dim() else p.nbytes for p in module.parameters())
    whole = sum(sizes.values())
    parts = [
        sum(sizes.pop(id(p), 0) for p in module.get_submodule(name).parameters())
        for name in part_names(module, topology.shards.shard)
    ]
    root, largest, part = whole - sum(parts), max(parts, default=0), cut / max(whole, 1)
    gathered = (root if topology.shards.reshard_after_forward else whole) + 3 * largest
    added_up, gradients = accumulates * memory.gradients, round(part * memory.gradients)
    return replace(
        memory,
        parameters=round(part * memory.parameters),
        gradients=gradients,
        optimizer=round(part * memory.optimizer),
        gathered=gathered,
        forward=memory.forward + added_up - gradients + gathered,
        backward=memory.backward + added_up + gathered + root + largest,
        update=round(part * memory.update),
    )


def in_flight(memory: Sequence[StageMemory], most: Sequence[int], num_samples: int, samples: int) -> list[StageMemory]:
    """The memory of stages that keep several micro-batches' activations, and gradients collected, at one time."""
    found: list[StageMemory] = []
    for stage, number in zip(memory, most, strict=True):
        kept, all_kept = (number - 1) * stage.activations, number >= -(-num_samples // samples)
        collected = max(0, stage.gradients - stage.activations) if all_kept else stage.gradients
        found.append(
            replace(
                stage,
                batch=round(stage.batch * num_samples / samples),
                activations=number * stage.activations,
                forward=stage.forward + kept,
                backward=stage.backward + kept + collected,
            )
        )
    return found
