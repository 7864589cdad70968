"""A module whose parameters are cut over the ranks, and gathered part by part when they are used."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.devices import buckets, flattened, unflattened
from ..core.errors import ConfigError
from ..core.options import Count
from ..core.patching import replaced
from ..core.private import of_torch, put
from ._fsdp2 import RootState, forget_sharding, set_local_part
from .refusals import refuse_assigned, refuse_copy, refuse_unreduced, verify_dtypes, verify_kept
from .whole import put_together

_KEY = "evener_shards"


Shard = Literal["auto"] | Sequence[str]
"""Which parts of a module are gathered one by one: chosen by the strategy, or names of submodules."""


@dataclass(frozen=True)
class ShardOptions:
    """How a module is cut over the ranks; see `FSDPStrategy`."""

    shard: Shard = "auto"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    replicas: Count = 1


class ShardedModule:
    """Cuts the parameters of a module in place.

    Args:
        module: the module, with the same values on all ranks.
        names: parts that are gathered one by one, each after the parts within it.
        mesh: the ranks; two dimensions replicate over the first.
        keeps: keep the whole parameters, for a script that goes on with them; see `put_together`.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], mesh: DeviceMesh, options: ShardOptions, keeps: bool
    ) -> None:
        self.module = module
        self._options = options
        self.group = mesh.get_group("shard")
        """The ranks that each parameter is cut over."""
        self.in_step = self._is_written = False
        self._before = dict(module.named_parameters(remove_duplicate=False)) if keeps else {}
        self._hooks = range(RemovableHandle.next_id, RemovableHandle.next_id)
        verify_dtypes(module, names)
        on_cpu = mesh.device_type == "cpu"  # there is nothing to pin for there
        offload = CPUOffloadPolicy(pin_memory=not on_cpu) if options.cpu_offload else OffloadPolicy()
        parts = [module.get_submodule(name) for name in names]
        hooks = [(of_torch.backward_hooks(p), of_torch.post_accumulate_grad_hooks(p)) for p in module.parameters()]
        for part in parts:
            again = options.reshard_after_forward
            fully_shard(part, mesh=mesh, offload_policy=offload, reshard_after_forward=again)
        fully_shard(module, mesh=mesh, offload_policy=offload)
        for parameter, (backward, accumulated) in zip(module.parameters(), hooks, strict=True):
            put(parameter, backward_hooks=backward, post_accumulate_grad_hooks=accumulated)
        for part in (module, *parts):
            setattr(type(part), "__deepcopy__", refuse_copy)  # noqa: B010  # a class that `fully_shard` has made
            part.register_load_state_dict_pre_hook(refuse_assigned)
        vars(module)[_KEY] = self
        root = cast(FSDPModule, module)
        # gloo has no mean; a group must take part with the same parameters on all ranks
        root.set_force_sum_reduction_for_comms(on_cpu)
        root.set_reduce_scatter_unused_params(True)
        self._state = RootState(module)
        self._gather_alone()
        self._dtypes = [parameter.dtype for parameter in self.parameters]

    def verify_same(self, options: ShardOptions) -> None:
        """Refuse to go on with a module that was cut in another way than is asked for now.

        Raises:
            ConfigError: an option, or the dtype of a parameter, differs.
        """
        before, dtypes = asdict(self._options), [parameter.dtype for parameter in self.parameters]
        asked = asdict(options).items()
        changed = [f"{key}={before[key]}, now {key}={value}" for key, value in asked if before[key] != value]
        changed += sorted({f"{was}, now {now}" for was, now in zip(self._dtypes, dtypes, strict=True) if was != now})
        if changed:
            raise ConfigError(
                f"fsdp: the module was cut in an earlier run of this process with {'; '.join(changed)}, and it stays "
                "cut as it is. Give the same options and the same precision, or make the module anew."
            )

    def allocate(self, device: torch.device) -> None:
        """Give what is on the meta device memory without values."""

        def allocated(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

        of_torch.apply(self.module)(allocated)

    def prime(self) -> None:
        """Gather each part once: memory that is first allocated in inference mode could not be trained with."""
        self._state.prime()
        with torch.inference_mode(False):
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    module.reshard()
        self._hooks = range(self._hooks.start, RemovableHandle.next_id)

    def _gather_alone(self) -> None:
        """Gather the root's parameters when the module itself is called outside of a step, in a hook of a callback."""

        def before(module: nn.Module, args: Any) -> None:
            if not self.in_step:
                self._state.begin_forward()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self.in_step:
                self._state.end_forward(output)
                if not torch.is_grad_enabled():
                    self.release()

        self.module.register_forward_pre_hook(before, prepend=True)
        self.module.register_forward_hook(after, always_call=True)

    @contextmanager
    def step(self, backward_follows: bool) -> Generator[None]:
        """Gather the root's own parameters for a step.

        Args:
            backward_follows: keep them for a backward pass after the step, at whose end they are released.
        """
        verify_kept(self._state.replaced)
        self.in_step = True
        self._announce(False)
        self._state.begin_forward()
        try:
            yield
        finally:
            self.in_step = False
            self._announce(True)
        self._state.end_forward(None)
        if not backward_follows:
            self.release()

    def release(self) -> None:
        """Release all that is gathered, also parts that are kept after their forward: outside of a step there are
        shards only, which callbacks may change and checkpoints contain."""
        self._state.release()

    def note_writes(self, note: Callable[[str, Tensor], None]) -> None:
        """Have a function receive what steps write to gathered parameters."""
        for group in self._state.groups:
            group.note = note

    def note_open_writes(self) -> None:
        """Note what a step has written to parameters that stay gathered until its backward pass ends."""
        for group in self._state.groups:
            group.note_writes()

    def verify_reduced(self) -> None:
        """Refuse gradients of this rank's own, before an optimizer steps without them.

        Raises:
            ConfigError: there are some.
        """
        refuse_unreduced([name for group in self._state.groups for name in group.unreduced()])

    def begin_backward(self, loss: Tensor) -> None:
        """Have the gradients that are left at the end of the loss's backward pass reduced."""
        self._announce(True)
        for group in self._state.groups:
            group.used.clear()
        if loss.requires_grad:
            loss.register_hook(self._state.begin_backward)

    def finish_backward(self) -> None:
        """Note that the backward pass has ended."""
        self._announce(not self.in_step)

    def _announce(self, is_announced: bool) -> None:
        for group in self._state.groups:
            group.is_announced = is_announced

    def keep_root(self, keep: bool) -> None:
        """Keep the root's own parameters after a backward pass: a step with several goes on with them."""
        cast(FSDPModule, self.module).set_reshard_after_backward(not keep, recurse=False)

    def follow_flags(self) -> None:
        """Freeze and unfreeze what is gathered as its shards are."""
        for group in self._state.groups:
            group.follow_flags()

    @contextmanager
    def written(self) -> Generator[None]:
        """Write to shards inside the block: what is gathered of them in a step goes there before, and follows after.

        An optimizer writes many times, within one such block.
        """
        if not self.in_step or self._is_written:
            yield
            return
        with replaced(self, "_is_written", True):
            for group in self._state.groups:
                group.put_back()
            yield
        self._state.gather_again()

    @contextmanager
    def without_reduction(self) -> Generator[None]:
        """Accumulate gradients on each rank inside the block."""
        root = cast(FSDPModule, self.module)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def recover(self) -> None:
        """Release everything after a failure within a step."""
        cast(FSDPModule, self.module).reset_iter_state()

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that were accumulated without; gradients that are added later do not change these."""
        self._state.finish_backward()

    def assign(self, tensor: Any, value: Any) -> None:
        """Give a shard the memory of another one, as `tensor.data = value` does with whole tensors."""
        if not any(group.assign(tensor, value) for group in self._state.groups):
            set_local_part(tensor, value)

    def put_together(self, optimizers: Sequence[Optimizer], is_first: bool) -> None:
        """Make the module whole again on rank 0, which hands it back to a script; all ranks must call this."""
        put_together(self.module, self._before, optimizers, is_first)
        for part in self.module.modules():
            forget_sharding(part)
            for hooks in [value for key, value in vars(part).items() if key.endswith("_hooks")]:
                for number in self._hooks:
                    hooks.pop(number, None)
        del vars(self.module)[_KEY]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards, also while the module has gathered parameters in their places; group by group."""
        return [parameter for group in self._state.groups for parameter in group.parameters]

    def unused(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by name, that had no gradient on this rank in the last backward pass."""
        return {
            name: parameter
            for group in self._state.groups
            for i, (name, parameter) in enumerate(zip(group.names, group.parameters, strict=True))
            if parameter.requires_grad and i not in group.used
        }


def sharded(module: nn.Module) -> ShardedModule | None:
    """What has cut a module, or None."""
    return vars(module).get(_KEY)


@torch.no_grad()
def broadcast_states(module: nn.Module, root_device: torch.device) -> None:
    """Give all ranks rank 0's parameters and buffers, tensor by tensor."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        moved = tensor.detach().to(root_device)
        dist.broadcast(moved, 0)
        tensor.copy_(moved)


@torch.no_grad()
def sync_buffers(module: nn.Module) -> None:
    """Give all ranks rank 0's buffers, in one transfer per dtype, as DistributedDataParallel does."""
    found = list(module.buffers())
    for places in buckets(found, sys.maxsize):
        flat = flattened([found[i] for i in places])
        dist.broadcast(flat, 0)
        for i, part in zip(places, unflattened(flat, [found[i].shape for i in places]), strict=True):
            found[i].copy_(part)
