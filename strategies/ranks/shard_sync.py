"""Reduce the gradients of a module that is cut over the ranks, with torch's FSDP2."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelPruning
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from ..core.errors import ConfigError
from ..core.module_checks import callbacks_of, verify_unscripted
from ..core.patching import Replacement, replaced
from ..distributed.objects import broadcast_weights, reduce_tensor
from ..pipeline.plan import find_parts
from ..sharding.parts import CallOrder, Shard, ShardOptions, automatic_parts, named_parts
from ..sharding.shard_calls import LateParameters, ShardCalls, verify_plain
from ..sharding.sharded_module import ShardedModule, sharded
from ..sharding.whole import apply_anew, broadcast_together, gather_tree, shard_like
from .gradient_sync import GradientSync

if TYPE_CHECKING:
    from .strategy import RankStrategy

_BUFFER_BYTES = 2**28
"""Bytes of buffers that are sent together, at most."""


class ShardSync(GradientSync):
    """Cuts parameters, gradients and optimizer state; a loss may leave parameters out (None: if a look shows any)."""

    evaluates_together = changes_evaluation = True  # each rank's forward needs the shards of all
    changes_update = True

    def __init__(self, strategy: "RankStrategy", options: ShardOptions, find_unused: bool | None) -> None:
        super().__init__(strategy)
        self._options, self._finds_unused = options, find_unused
        self._built, self.has_built = dict[str, Tensor](), False
        """What `configure_model` has made, by name, until it is cut."""
        self._shards: ShardedModule | None = None
        self._late: LateParameters | None = None
        self._reduces, self._had_none, self._at_end = True, set[int](), ExitStack()

    @property
    def shards(self) -> ShardedModule:
        """The module, cut over the ranks."""
        assert self._shards is not None
        return self._shards

    @contextmanager
    def creating(self, module: nn.Module) -> Generator[None]:
        """Build the layers of `configure_model` in the first rank's host memory alone; `place` sends them to all."""
        before = {id(tensor) for _, tensor in _tensors(module)}
        with torch.device("cpu" if self._strategy.is_global_zero else "meta"):
            yield
        self._built = {name: tensor.detach() for name, tensor in _tensors(module) if id(tensor) not in before}
        self.has_built = bool(self._built)
        apply_anew(module, lambda one: one if id(one) in before else torch.empty_like(one, device="meta"))

    def place(self, trainer: pl.Trainer) -> None:
        """Cut the module over the ranks, and make the optimizers of its shards."""
        strategy = self._strategy
        module, accelerator, agreement = strategy.module, strategy.accelerator, strategy.contract.agreement
        assert accelerator is not None
        verify_unscripted(module)
        accelerator.setup(trainer)
        if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
            raise ConfigError("fsdp: ModelPruning replaces parameters, which are cut over the ranks. Use strategy=ddp.")
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and strategy._layer_sync is not None:
            strategy.model = strategy._layer_sync.apply(module)
        strategy.precision_plugin.convert_module(module)
        self._shards = self._cut(module)
        for copy in kept_copies(callbacks_of(trainer), module):
            self._cut(copy)
        if fits:
            self._shards.keep_root(not module.automatic_optimization)
            for name in () if module.automatic_optimization else ("toggle_optimizer", "untoggle_optimizer"):
                self._at_end.callback(Replacement(module, name, self._toggle).remove)
            strategy.setup_optimizers(trainer)
            self._shards.give_shards(strategy.optimizers)
            self._late = LateParameters(module)
            for handle in self._late.handles:
                self._at_end.callback(handle.remove)
        strategy.setup_precision_plugin()
        self._at_end.callback(ShardCalls(self._shards, strategy.group.verify_together).close)
        self._shards.note = agreement.note  # each rank keeps a part of what it wrote
        self._shards.calls = order = CallOrder(strategy.group.wait)
        if strategy.group.heartbeat is not None:
            strategy.group.heartbeat.count_calls = lambda: order.num
        self._at_end.callback(setattr, self._shards, "calls", None)

    @override
    def make_whole(self) -> None:
        shards = sharded(self._strategy.module)
        if shards is not None and not shards.is_for_training:
            shards.verify_same(self._options)
            shards.put_together((), True)

    def _cut(self, module: nn.Module) -> ShardedModule:
        """Cut a module over the ranks, unless an earlier run of this process has done so."""
        options, device = self._options, self._strategy.root_device
        found = sharded(module)
        if found is not None:
            found.verify_same(options)
            return found
        parts, outside = part_names(module, options.shard), self._strategy.whole_batches.outside
        if left := [name for name in parts if options.shard == "auto" and name in outside]:
            parts = [name for name in parts if name not in left]
            rank_zero_info(
                f"fsdp: gathered for the whole step: {', '.join(left[:3])}{', ...' if left[3:] else ''}. Samples "
                "choose these, or the step uses their parameters outside of their forward, or in a backward "
                "pass of its own."
            )
        waiting = [name for name, tensor in _tensors(module) if tensor.is_meta]
        for name in waiting:
            if name not in self._built or (self._built[name].is_meta and self._strategy.is_global_zero):
                raise ConfigError(
                    f"fsdp: {name} is on the meta device, so that it has no values. Build the layers in "
                    "configure_model, without torch.device('meta'): only the first rank has memory for them there."
                )
        broadcast_weights(module, device)
        num, replicas = self._strategy.num_together, options.replicas
        if num % replicas:
            raise ConfigError(
                f"fsdp: {num} ranks don't divide into replicas={replicas} groups. Give a divisor of the number of "
                "ranks."
            )
        shape = (num,) if replicas == 1 else (replicas, num // replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        shards = ShardedModule(module, parts, mesh, device, options)
        if waiting:

            def allocated(one: Tensor) -> Tensor:
                return torch.empty_like(one, device=device) if one.is_meta else one

            module._apply(allocated)
        for name, tensor in _tensors(module) if waiting else ():
            if name in waiting:  # made on the first rank: sent tensor by tensor, of which each rank keeps its shard
                made = self._built.pop(name)
                value = torch.empty_like(made, device=device) if made.is_meta else made.to(device)
                dist.broadcast(value, 0)
                with torch.no_grad():
                    tensor.copy_(shard_like(value, tensor))
        shards.prime()
        shards.is_for_training = bool(waiting) or self._strategy.trainer.state.fn == TrainerFn.FITTING
        return shards

    @override
    def expect_unused(self) -> None:
        if self._finds_unused is None:
            self._finds_unused = True

    def _toggle(self, own: Callable[..., None], optimizer: Optimizer | LightningOptimizer) -> None:
        """Freeze or unfreeze parameters in a step: what is gathered follows its shards."""
        own(optimizer)
        if self.shards.in_step:
            self.shards.follow_flags()

    @override
    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._late is not None:
            self._late.verify()
        self.sync_buffers()
        output = self.shards.run(partial(step, *args, **kwargs), self._strategy.module.automatic_optimization)
        verify_plain(output)
        return output

    @override
    def evaluate(self, step: Callable[[], Any]) -> Any:
        return self.shards.run(step, backward_follows=False)

    @override
    def sync_buffers(self) -> None:
        if buffers := list(self._strategy.module.buffers()):
            broadcast_together(buffers, _BUFFER_BYTES)

    @override
    @contextmanager
    def accumulating(self, seen: bool) -> Generator[None]:
        """Accumulate whole gradients on each rank without reducing them, where nobody sees the difference."""
        with nullcontext() if seen else self.shards.without_reduction(), replaced(self, "_reduces", seen):
            yield

    @override
    def begin_backward(self, loss: Tensor) -> None:
        self._had_none = {id(p) for p in self.shards.parameters if p.grad is None}
        self.shards.begin_backward(loss)

    @override
    def finish_backward(self) -> None:
        """Refuse parameters that took no part, or, as in manual optimization, leave unused ones without a gradient."""
        shards = self.shards
        shards.finish_backward()
        if not self._reduces:
            return
        shards.reduce_scalars()
        unused = shards.take_unused()
        if self._finds_unused or not self._strategy.module.automatic_optimization:
            trained, left = [p for p in shards.parameters if p.requires_grad], set(map(id, unused.values()))
            used = torch.tensor([id(p) not in left for p in trained], dtype=torch.uint8)
            used = used.to(self._strategy.root_device)
            dist.all_reduce(used, dist.ReduceOp.MAX)
            for parameter, by_any in zip(trained, used.tolist(), strict=True):
                if not by_any and id(parameter) in self._had_none:
                    parameter.grad = None
        elif unused:
            raise ConfigError(
                f"fsdp: parameters took no part in the loss: {', '.join(unused)}. Set "
                "strategy.find_unused_parameters=true, or freeze them with requires_grad_(False)."
            )

    @override
    @contextmanager
    def updating(self) -> Generator[None]:
        with self.shards.written():
            if not self._strategy.module.automatic_optimization:
                self.shards.verify_reduced()
            yield

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
                own = gradients[name].to(self._strategy.root_device, copy=True)
                parameter.grad = shard_like(reduce_tensor(own, reduce_op="mean"), parameter)

    @override
    @contextmanager
    def ending(self) -> Generator[None]:
        strategy = self._strategy
        self._at_end.close()
        self._shards = self._late = None
        shards = None if strategy.lightning_module is None else sharded(strategy.lightning_module)
        if shards is None:
            yield
            return
        if strategy.group.failed:
            shards.recover()  # it may have failed within a step
        # shards belong to their devices: `test` after `fit` goes on with them
        with replaced(shards.module, "cpu", lambda: shards.module):
            yield
        if strategy.launcher is not None and not strategy.group.failed:  # a script goes on with the module
            shards.put_together(strategy.optimizers, strategy.is_global_zero)


def part_names(module: nn.Module, shard: Shard) -> list[str]:
    """The parts that are gathered one by one."""
    if not isinstance(shard, str):
        return named_parts(module, shard)
    return automatic_parts(module, [part.name for part in find_parts(module) if not part.loose])


def kept_copies(callbacks: Iterable[pl.Callback], module: nn.Module) -> list[nn.Module]:
    """The copies of a module that callbacks keep, such as those of a moving average."""
    held = [value for callback in callbacks for value in vars(callback).values() if isinstance(value, nn.Module)]
    modules = [value.module if isinstance(value, AveragedModel) else value for value in held]

    def shapes(one: nn.Module) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in one.named_parameters()}

    return [copy for copy in modules if copy is not module and shapes(copy) == shapes(module)]


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
