"""Train with one process per device, cutting parameters, gradients and optimizer state over the ranks (FSDP2)."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, Literal

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from .balance.ranks import RankBalance
from .batch.structure import BatchDims
from .core.errors import ConfigError
from .core.options import Advice, Count, Positive, checked
from .core.patching import Replacement, replaced
from .data.loaders import BatchSizeIs
from .ddp import DDPStrategy
from .distributed.scripts.launcher import StartMethod
from .distributed.zero_weight_step import zero_weight_step
from .pipeline.module_parts import find_parts
from .pipeline.recompute import RecomputeOption
from .sharding.deferred import DeferredTensors
from .sharding.parts import automatic_parts, named_parts
from .sharding.placed import ShardIO, Writers, place_shards
from .sharding.refusals import (
    unused_parameters,
    verify_batches,
    verify_callbacks,
    verify_optimizers,
    verify_plain,
    verify_replicas,
    without_values,
)
from .sharding.sharded_module import ShardedModule, Sharding, broadcast_states, sharded, sync_buffers
from .sharding.whole import gather_tree, holds_shards, shard_like, shard_optimizer_state
from .sharding.whole_calls import WholeCalls

Shard = Literal["auto"] | Sequence[str]
"""Which parts of a module are gathered one by one: chosen by the strategy, or names of submodules."""

GivenWeights = Annotated[
    Sequence[float],
    Advice(
        "They can't be measured: ranks wait for each other at every part of the module, so that all take the same time."
    ),
]


class FSDPStrategy(DDPStrategy):
    """Train a module that is too large for one device, one process per device: each rank holds a part of everything.

    Every parameter, its gradient and its optimizer state are cut over the ranks, with torch's `fully_shard`. A part of
    the module is gathered when its forward runs, and released after it. Batches are divided as by `DDPStrategy`, and
    training equals one device's.

    Args:
        shard: the parts that are gathered one by one: `auto`, or names of submodules. The parameters that are in none
            of them are gathered for the whole step; with an empty list all are.
        reshard_after_forward: release a part after its forward and gather it again for its backward pass. Without it
            there is less to communicate, and the whole module is gathered between forward and backward.
        cpu_offload: keep shards, and so the optimizer's state, in host memory.
        replicas: number of groups of ranks that hold the whole module each; gradients are averaged over them.
        find_unused_parameters: allow parameters that take no part in the loss, which costs one small all-reduce per
            step.
        weights: share of each rank of a global batch, in any unit; None divides evenly.
        batch_size_is: as in `DDPStrategy`.
        batch_dims: as in `DDPStrategy`.
        timeout_s: as in `DDPStrategy`.
        backend: as in `DDPStrategy`.
        sync_batchnorm: as in `DDPStrategy`.
        start_method: as in `DDPStrategy`.
        recompute: as in `DDPStrategy`.

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "fsdp"
    evaluates_in_step = True  # each rank's forward needs the shards of all

    @checked
    def __init__(
        self,
        shard: Shard = "auto",
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        replicas: Count = 1,
        find_unused_parameters: bool = False,
        weights: GivenWeights | None = None,
        batch_size_is: BatchSizeIs = "per_device",
        batch_dims: BatchDims | None = None,
        timeout_s: Positive = 1800.0,
        backend: str | None = None,
        sync_batchnorm: bool = False,
        recompute: RecomputeOption = "never",
        start_method: StartMethod | None = None,
    ) -> None:
        verify_batches(weights, batch_size_is)
        super().__init__(
            batch_size_is=batch_size_is,
            batch_dims=batch_dims,
            timeout_s=timeout_s,
            backend=backend,
            sync_batchnorm=sync_batchnorm,
            recompute=recompute,
            start_method=start_method,
        )
        self.shard: Shard = shard
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.replicas = replicas
        self.find_unused_parameters = find_unused_parameters
        if weights is not None:
            self.balance = RankBalance(self.strategy_name, weights, hysteresis=0.0)
        self._shards: ShardedModule | None = None
        self._calls: WholeCalls | None = None
        self._deferred: DeferredTensors | None = None
        self._reduces = True
        self._had_none: set[int] = set()
        self._toggles: list[Replacement] = []

    @property
    def shards(self) -> ShardedModule:
        """The module, cut over the ranks."""
        assert self._shards is not None
        return self._shards

    @override
    def stands_in(self) -> bool:
        return not self.trainer.training and not self.shares.counts

    @override
    @contextmanager
    def model_sharded_context(self) -> Generator[None]:
        """Build the layers of `configure_model` without memory; `place` fills them shard by shard."""
        self._deferred = DeferredTensors()
        with self._deferred:
            yield
        self._deferred.to_meta(self.module)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return any(tensor.is_meta for tensor in self.module.parameters())

    @override
    def place(self, trainer: pl.Trainer) -> None:
        module, accelerator = self.module, self.accelerator
        assert accelerator is not None
        accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            verify_callbacks(_callbacks(trainer))
        if fits and self._layer_sync is not None:
            self.model = self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self._shards = self._shard(module)
        for copy in _copies(trainer, module):
            self._shard(copy)
        if fits:
            self._shards.keep_root(not module.automatic_optimization)
            if not module.automatic_optimization:
                names = ("toggle_optimizer", "untoggle_optimizer")
                self._toggles = [Replacement(module, name, self._toggle) for name in names]
            self.setup_optimizers(trainer)
            verify_optimizers(self.optimizers)
        self.setup_precision_plugin()
        self._calls = WholeCalls(self._shards, self.agreement.note)
        self._shards.note_writes(self.agreement.note)

    def _toggle(self, own: Callable[..., None], optimizer: Optimizer | LightningOptimizer) -> None:
        """Freeze or unfreeze parameters in a step: what is gathered follows its shards."""
        own(optimizer)
        if self.shards.in_step:
            self.shards.follow_flags()

    def _shard(self, module: nn.Module) -> ShardedModule:
        """Cut a module over the ranks, unless an earlier run of this process has done so."""
        names = ("shard", "reshard_after_forward", "cpu_offload", "replicas")
        options = {name: getattr(self, name) for name in names}
        found = sharded(module)
        if found is not None:
            found.verify_same(options)
            return found
        parts = tuple(self.part_names(module))
        waiting = {name: tensor for name, tensor in _tensors(module) if tensor.is_meta}
        broadcast_states(module, self.root_device)
        shape = self._mesh_shape()
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        sharding = Sharding(parts, mesh, self.reshard_after_forward, self.cpu_offload, options, self._ends_with_run)
        shards = ShardedModule(module, sharding)
        if waiting:
            self._fill(shards, waiting)
        shards.prime()
        return shards

    def part_names(self, module: nn.Module) -> list[str]:
        """The parts of a module that are gathered one by one."""
        if not isinstance(self.shard, str):
            return named_parts(module, self.shard)
        return automatic_parts(module, [part.name for part in find_parts(module) if not part.loose])

    def _fill(self, shards: ShardedModule, waiting: Mapping[str, Tensor]) -> None:
        """Compute the tensors that `configure_model` has only announced, one by one, and keep this rank's shards."""
        if self._deferred is None:
            raise ConfigError(without_values(next(iter(waiting))))
        shards.allocate(self.root_device)
        for name, tensor in _tensors(shards.module):
            if name in waiting:
                value = self._deferred.value(waiting[name]).to(self.root_device)
                dist.broadcast(value, 0)
                with torch.no_grad():
                    tensor.copy_(shard_like(value, tensor))
        self._deferred = None

    def _mesh_shape(self) -> tuple[int, ...]:
        verify_replicas(self.world_size, self.replicas)
        return (self.world_size,) if self.replicas == 1 else (self.replicas, self.world_size // self.replicas)

    @override
    def _own_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        module, shards = self.module, self.shards
        assert self._calls is not None
        self._calls.verify_unshared()
        self._sync_buffers()
        context = self.precision_plugin.train_step_context
        with shards.step(backward_follows=module.automatic_optimization), context():
            output = self._step_in_layout(*args, **kwargs)
        verify_plain(output)
        return output

    @override
    def _sync_buffers(self) -> None:
        sync_buffers(self.module)

    @override
    def accumulating(self, seen: bool) -> AbstractContextManager[None]:
        """Accumulate whole gradients on each rank without reducing them, where nobody sees the difference."""
        return nullcontext() if seen else self._without_reduction()

    @contextmanager
    def _without_reduction(self) -> Generator[None]:
        self._reduces = False
        try:
            with self.shards.without_reduction():
                yield
        finally:
            self._reduces = True

    @override
    def scale_loss(self, loss: Tensor) -> Tensor:
        loss = super().scale_loss(loss)
        self._had_none = {id(p) for p in self.shards.parameters if p.grad is None}
        self.shards.begin_backward(loss)
        return loss

    @override
    def finish_backward(self) -> None:
        """Refuse, or find, parameters that took no part in the loss; those of other ranks' parts are reduced as zeros.

        A step of manual optimization often trains some parameters only, the same on all ranks or not.
        """
        super().finish_backward()
        self.shards.finish_backward()
        if not self._reduces:
            return
        if self.find_unused_parameters or not self.module.automatic_optimization:
            self._take_away_zeros(self.shards)
        elif unused := self.shards.unused():
            raise RuntimeError(unused_parameters(unused))

    def _take_away_zeros(self, shards: ShardedModule) -> None:
        """Leave parameters without a gradient that no rank has used, as on one device."""
        trained = [p for p in shards.parameters if p.requires_grad]
        unused = {id(parameter) for parameter in shards.unused().values()}
        used = torch.tensor([id(parameter) not in unused for parameter in trained], dtype=torch.uint8)
        used = used.to(self.root_device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, by_any in zip(trained, used.tolist(), strict=True):
            if not by_any and id(parameter) in self._had_none:
                parameter.grad = None

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self.shards.written():
            if not self.module.automatic_optimization:
                self.shards.verify_reduced()
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @override
    def _evaluate(self, step: str, context: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self.shards.step(backward_follows=False):
            if not self.stands_in():
                return super()._evaluate(step, context, *args, **kwargs)
            with zero_weight_step(self.module, silent=True), context():
                getattr(self.module, step)(*args, **kwargs)
            return None

    @property
    def _shard_io(self) -> ShardIO | None:
        """What writes and reads checkpoints, if it can do so in shards."""
        io: Any = self.checkpoint_io
        return io if isinstance(io, ShardIO) else None

    def _gathered(self, tree: Any) -> Any:
        """Whole tensors on rank 0, unless checkpoints are written in shards."""
        io = self._shard_io
        return tree if io is not None and io.sharded else gather_tree(tree, keep=self.is_global_zero)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._gathered(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return self._gathered(super().optimizer_state(optimizer))

    @override
    def teardown(self) -> None:
        self._shards = None
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        shards = None if self.lightning_module is None else sharded(self.lightning_module)
        if shards is None:
            super().teardown()
            return
        while self._toggles:
            self._toggles.pop().remove()
        if self._failed:
            shards.recover()  # it may have failed within a step
        # shards belong to their devices: `test` after `fit` goes on with them
        with replaced(shards.module, "cpu", lambda: shards.module):
            super().teardown()
        if self._ends_with_run and not self._failed:
            shards.put_together(self.optimizers, self.is_global_zero)

    @property
    def _ends_with_run(self) -> bool:
        """Whether the ranks end with this run, after which a script goes on with the module."""
        return self._launcher is not None

    @override
    def whole_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        self.shards.reduce_accumulated()
        named = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
        return gather_tree(named, keep=True)

    @override
    def restore_gradients(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of an unfinished step; those of ranks that were not averaged are averaged now."""
        for name, parameter in module.named_parameters():
            if name in gradients:
                mean = self.reduce(gradients[name].to(self.root_device, copy=True), reduce_op="mean")
                parameter.grad = shard_like(mean, parameter)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        io = self._shard_io
        if io is not None and io.sharded:
            writers = Writers(self.is_global_zero, self.broadcast, self.timeout_s)
            io.save_shards(place_shards(checkpoint, self.is_global_zero), filepath, writers)
            return
        if holds_shards(checkpoint):  # of a callback, such as the weights of a moving average
            checkpoint = gather_tree(checkpoint, keep=self.is_global_zero)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        io = self._shard_io
        if io is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        return io.load_shards(checkpoint_path, self.global_rank, self.world_size)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.module
        own = module.state_dict()
        state = {name: shard_like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            shard_optimizer_state(state, [p for group in optimizer.param_groups for p in group["params"]])
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return getattr(trainer, "callbacks")  # noqa: B009  # not annotated by Lightning


def _copies(trainer: pl.Trainer, module: pl.LightningModule) -> list[nn.Module]:
    """The copies of the module that callbacks keep, such as those of a moving average."""
    kept = [
        value for callback in _callbacks(trainer) for value in vars(callback).values() if isinstance(value, nn.Module)
    ]
    modules = [value.module if isinstance(value, AveragedModel) else value for value in kept]
    return [copy for copy in modules if copy is not module and _shapes(copy) == _shapes(module)]


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}
