"""Describe how a strategy spreads a module and a batch over devices, as numbers for `mode=plan`."""

from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig
from pytorch_lightning.strategies import Strategy

from ...strategies import ConfigError, SingleDeviceStrategy
from ...strategies.balanced_dp import BalancedDataParallelStrategy
from ...strategies.batch.policies import Even, Policy
from ...strategies.core.device_names import ALLOWED, accelerator_type, num_available, resolve_devices
from ...strategies.core.devices import has_streams
from ...strategies.distributed.environment import num_processes
from ...strategies.dp import DataParallelStrategy
from ...strategies.fsdp import FSDPStrategy
from ...strategies.model_parallel import ModelParallelStrategy
from ...strategies.pipeline.options import ScheduleName, StageOptions
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import name_of
from ..config.checks import plain


@dataclass(frozen=True)
class Topology:
    """How a strategy spreads a batch of the loader over the devices of one node.

    Args:
        num_stages: devices that one copy of the module is cut across.
        is_replicated: whether the devices of a process hold replicas, of which the first has the optimizer.
        is_per_rank: whether each rank reads its own batch.
        policy: how a batch is cut among replicas or ranks.
        buckets: number of gradient copies in DDP's buckets.
        num_microbatches: number of micro-batches that a batch is cut into on stages.
        schedule: order of the micro-batches.
        num_owners: number of ranks that share the optimizer's state.
        num_shards: number of ranks that share all of the module.
        workspace: bytes of each device that its libraries keep.
    """

    name: str
    num_devices: int
    num_stages: int = 1
    num_ranks: int = 1
    is_replicated: bool = False
    is_per_rank: bool = True
    policy: Policy = field(default_factory=Even)
    buckets: int = 0
    num_microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    num_owners: int = 1
    num_shards: int = 1
    workspace: int = 0

    def simulated(self, samples: int) -> int:
        """Samples of the step to simulate, for a copy of the module that has this many: those of a micro-batch."""
        return -(-samples // self.num_microbatches)

    def samples(self, batch: int) -> list[int]:
        """Samples per copy of the module on the first node, for a batch of the loader."""
        copies = self.num_devices // self.num_stages
        if self.is_replicated:
            return self.policy.sizes(batch, copies)
        return [batch] * copies if self.is_per_rank else self.policy.sizes(batch, self.num_ranks)[:copies]

    def global_batch(self, batch: int) -> int:
        """Samples over all processes, for a batch of the loader."""
        return batch * self.num_ranks if self.is_per_rank and not self.is_replicated else batch


def topology_of(strategy: Strategy, num_devices: int, num_nodes: int) -> Topology:
    """Determine how a strategy that is not set up spreads its work, or refuse one that is not this project's."""
    name = name_of(strategy)
    if isinstance(strategy, SingleDeviceStrategy):
        strategy.parallel_devices = [strategy.root_device] * num_devices
        return Topology(name, 1)
    if isinstance(strategy, DataParallelStrategy):
        if strategy.replica_options.submodule is not None or strategy.model_parallel_size > 1:
            option = "submodule" if strategy.model_parallel_size == 1 else "model_parallel_size"
            raise ConfigError(f"mode=plan does not support {name}.{option}. Use mode=compare, which measures.")
        strategy.parallel_devices = [torch.device("cpu")] * num_devices
        policy = strategy.make_policy() if isinstance(strategy, BalancedDataParallelStrategy) else strategy.policy
        policy.verify(num_devices, name)
        owners = num_devices if strategy.shard_optimizer else 1
        return Topology(name, num_devices, is_replicated=True, policy=policy, num_owners=owners)
    if isinstance(strategy, ModelParallelStrategy):
        cut = strategy.stage_options
        return Topology(name, num_devices, num_devices, num_microbatches=cut.num_microbatches, schedule=cut.schedule)
    if not isinstance(strategy, RankStrategy):
        raise ConfigError(f"mode=plan does not support the strategy {name}. Choose one of this project's, such as ddp.")
    if isinstance(strategy, FSDPStrategy):
        return _of_shards(strategy, name, num_devices, num_nodes)
    num_stages = 1 if strategy.stage_options is None else strategy.devices_per_process
    num_ranks = num_processes(num_devices, num_stages) * num_nodes
    buckets = 0 if strategy._ddp_kwargs.get("gradient_as_bucket_view") else 1
    per_rank = strategy.batch_size_is == "per_device"
    stages = strategy.stage_options or StageOptions()
    owners = num_ranks if strategy.shard_optimizer else 1
    return Topology(
        name, num_devices, num_stages, num_ranks, False, per_rank, strategy.policy, buckets, stages.num_microbatches,
        stages.schedule, owners,
    )  # fmt: skip


def _of_shards(strategy: FSDPStrategy, name: str, num_devices: int, num_nodes: int) -> Topology:
    if strategy.shards.cpu_offload:
        raise ConfigError("mode=plan does not support fsdp.cpu_offload. Use mode=compare, which measures.")
    num_ranks = num_devices * num_nodes
    per_rank = strategy.batch_size_is == "per_device"
    if num_ranks % strategy.shards.replicas:
        raise ConfigError(f"fsdp: {num_ranks} ranks don't divide into replicas={strategy.shards.replicas} groups.")
    return Topology(
        name, num_devices, num_ranks=num_ranks, is_per_rank=per_rank, policy=strategy.policy,
        num_shards=num_ranks // strategy.shards.replicas,
    )  # fmt: skip


def count_devices(cfg: DictConfig) -> int:
    """Return the number of devices per node that `devices=` means; they need not exist unless it is `auto`."""
    devices = plain(cfg.devices)
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if str(devices) in ("auto", "-1"):
        return num_available(accelerator_type(cfg.accelerator))
    if isinstance(devices, str) and "," in devices:
        return len(devices.split(","))
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigError(f"devices={devices}: at least one device is needed. {ALLOWED}.")
    return int(devices)


def workspace_bytes(cfg: DictConfig) -> int:
    """Bytes that the libraries of an accelerator keep of a matrix product, forward and backward; 0 without one here.

    cuBLAS keeps a workspace for each thread that launches work, and backward has its own: 32 MiB each on an H200.
    """
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
