"""Cut a module over the ranks, and fill it with what `configure_model` has only announced."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

from ..core.errors import ConfigError
from ..pipeline.module_parts import find_parts
from ..sharding.deferred import DeferredTensors
from ..sharding.parts import automatic_parts, named_parts
from ..sharding.refusals import verify_replicas, without_values
from ..sharding.sharded_module import Shard, ShardedModule, ShardOptions, broadcast_states, sharded
from ..sharding.whole import shard_like

if TYPE_CHECKING:
    from .strategy import RankStrategy


class ShardPlacing:
    """Cuts modules over the ranks of a strategy."""

    def __init__(self, strategy: "RankStrategy", options: ShardOptions) -> None:
        self._strategy = strategy
        self._options = options
        self._deferred: DeferredTensors | None = None

    @contextmanager
    def creating(self, module: nn.Module) -> Generator[None]:
        """Build the layers of `configure_model` without memory; `cut` fills them shard by shard."""
        self._deferred = DeferredTensors()
        with self._deferred:
            yield
        self._deferred.to_meta(module)

    @property
    def ends_with_run(self) -> bool:
        """Whether the ranks end with this run, after which a script goes on with the module."""
        return self._strategy.launcher is not None

    def cut(self, module: nn.Module) -> ShardedModule:
        """Cut a module over the ranks, unless an earlier run of this process has done so."""
        options, device = self._options, self._strategy.root_device
        found = sharded(module)
        if found is not None:
            found.verify_same(options)
            return found
        parts = part_names(module, options.shard)
        waiting = {name: tensor for name, tensor in _tensors(module) if tensor.is_meta}
        broadcast_states(module, device)
        num, replicas = self._strategy.world_size, options.replicas
        verify_replicas(num, replicas)
        shape = (num,) if replicas == 1 else (replicas, num // replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        shards = ShardedModule(module, parts, mesh, device, options, self.ends_with_run)
        if waiting:
            self._fill(shards, waiting, device)
        shards.prime()
        return shards

    def _fill(self, shards: ShardedModule, waiting: Mapping[str, Tensor], device: torch.device) -> None:
        """Compute the tensors that `configure_model` has only announced, one by one, and keep this rank's shards."""
        if self._deferred is None:
            raise ConfigError(without_values(next(iter(waiting))))
        shards.allocate(device)
        for name, tensor in _tensors(shards.module):
            if name in waiting:
                value = self._deferred.value(waiting[name]).to(device)
                dist.broadcast(value, 0)
                with torch.no_grad():
                    tensor.copy_(shard_like(value, tensor))
        self._deferred = None


def part_names(module: nn.Module, shard: Shard) -> list[str]:
    """The parts of a module that are gathered one by one."""
    if not isinstance(shard, str):
        return named_parts(module, shard)
    return automatic_parts(module, [part.name for part in find_parts(module) if not part.loose])


def kept_copies(callbacks: Iterable[pl.Callback], module: nn.Module) -> list[nn.Module]:
    """The copies of a module that callbacks keep, such as those of a moving average."""
    held = [value for callback in callbacks for value in vars(callback).values()]
    kept = [value for value in held if isinstance(value, nn.Module)]
    modules = [value.module if isinstance(value, AveragedModel) else value for value in kept]
    return [copy for copy in modules if copy is not module and _shapes(copy) == _shapes(module)]


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}
