"""A module whose parameters are cut over the ranks, and gathered part by part when they are used."""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from ..core.errors import ConfigError
from ..core.patching import Replacement, replaced
from .gathered import Gathered, Kept
from .parts import CallOrder, InOrder, ShardOptions
from .whole import apply_anew, gather_tree, shard_entry

_KEY = "evener_shards"


def sharded(module: nn.Module) -> "ShardedModule | None":
    """What has cut a module, or None."""
    return vars(module).get(_KEY)


class _Root(nn.Module):
    """Runs a step of a module as its forward, around which torch gathers and reduces what is in no part.

    A LightningModule is not called as a whole: a step calls its parts, in any way it likes, and perhaps itself.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[[], Any]) -> Any:
        return step()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        type(self.module)._apply(self.module, *args, **kwargs)  # the module's own is this one
        return self


class ShardedModule:
    """Cuts the parameters of a module, which have the same values on all ranks, in place.

    The parts in `names` are gathered one by one; a mesh of two dimensions replicates over the first.
    """

    calls: CallOrder | None = None
    """By which ranks communicate parts in one order during a run."""
    is_for_training = True
    """Whether it was cut by a run that trains; what an evaluation has cut is not verified yet."""
    in_step = _is_written = False
    _is_announced = _reduces = True
    """Whether a backward pass may have gradients, and reduces them: its loss is weighted by the rank's samples."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], mesh: DeviceMesh, device: torch.device, options: ShardOptions
    ) -> None:
        self.module, self._options = module, options
        self.note: Callable[[str, Tensor], None] = lambda name, value: None
        """Receives the name and the value of a gathered parameter that was written to."""
        self._used: set[int] = set()
        self._before = dict(module.named_parameters(remove_duplicate=False))
        self._hooks = range(RemovableHandle.next_id, RemovableHandle.next_id)
        """The numbers of the hooks that are registered here."""
        parts = [module.get_submodule(name) for name in names]
        hooks = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in module.parameters()]
        self._gathered: dict[nn.Module, list[Gathered]] = {part: [] for part in parts}
        on_cpu = mesh.device_type == "cpu"  # there is nothing to pin for there
        offload = CPUOffloadPolicy(pin_memory=not on_cpu) if options.cpu_offload else OffloadPolicy()
        self._root: Any = _Root(module)

        def moved(tensor: Tensor) -> Tensor:
            return tensor if tensor.device == device or tensor.is_meta else tensor.detach().to(device)

        for name, part in zip((*names, ""), (*parts, self._root), strict=True):
            # torch's FSDP would set `tensor.data`, which it refuses for devices of other makers (PrivateUse1)
            apply_anew(part, moved)
            for metric in (one for one in part.modules() if isinstance(one, Metric)):
                metric._apply(moved)  # its states are neither parameters nor buffers
            scalars = {parameter for parameter in part.parameters() if not parameter.dim()}  # torch can't cut them
            again = options.reshard_after_forward if name else None  # torch keeps the root's own by itself
            part.register_forward_hook(self._put_back)
            fully_shard(part, mesh=mesh, offload_policy=offload, ignored_params=scalars, reshard_after_forward=again)
            cut, said = cast(Any, part), name or "the rest of the module"
            verify = partial(self._verify_call, f"gathering {said}")
            cut.set_custom_all_gather(InOrder(dist.all_gather_single, verify))
            verify = partial(self._verify_call, f"reducing gradients of {said}")
            cut.set_custom_reduce_scatter(InOrder(dist.reduce_scatter_single, verify))
            for key, before in self._before.items():
                if key.startswith(f"{name}." if name else "") and before.dim() and not before.is_meta:
                    before.data = before.data.new_empty(0)  # the shards are copies
        for loads in (part._load_state_dict_post_hooks for part in module.modules()):
            loads.update({n: partial(_unless_gathered, own) for n, own in loads.items() if n >= self._hooks.start})
        for parameter, (backward, accumulated) in zip(module.parameters(), hooks, strict=True):
            parameter._backward_hooks = backward
            parameter._post_accumulate_grad_hooks = accumulated
        vars(module).update({_KEY: self, "__deepcopy__": partial(_refuse_copy, module)})
        # torch learns of new shards, by `.to()`, from its root
        self._conversion = Replacement(module, "_apply", self._convert)
        for layer in (one for one in module.modules() if isinstance(one, nn.RNNBase)):
            # cuDNN would copy the weights, in each forward, to memory of its own, into which no values are gathered
            Replacement(layer, "flatten_parameters", _leave)
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")
        # gloo has no mean; a group must take part with the same parameters on all ranks
        self._root.set_force_sum_reduction_for_comms(on_cpu)
        self._root.set_reduce_scatter_unused_params(True)
        # the module itself may be called outside of a step, in a hook of a callback
        module.register_forward_pre_hook(self._before_call, prepend=True)
        module.register_forward_hook(self._after_call, always_call=True)

    def verify_same(self, options: ShardOptions) -> None:
        """Refuse to go on with a module that was cut in another way than is asked for now."""
        if options != self._options or self._dtypes != [parameter.dtype for parameter in self.parameters]:
            raise ConfigError(
                f"fsdp: the module was cut in an earlier run of this process with {self._options}, and it stays cut as "
                "it is. Give the same options and the same precision, or make the module anew."
            )

    def _verify_call(self, call: str) -> None:
        if self.calls is not None:
            self.calls.verify(call)

    def _convert(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> nn.Module:
        self._root._apply(*args, **kwargs)
        return self.module

    def _before_call(self, *_: Any) -> None:
        if not self.in_step:
            self._root.unshard()

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.in_step and torch.is_grad_enabled():
            self._announce_backward(output)
        elif not self.in_step:
            self.release()

    def prime(self) -> None:
        """Gather each part once: memory that is first allocated in inference mode could not be trained with."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._scalars = [parameter for parameter in self.module.parameters() if not parameter.dim()]
        with torch.inference_mode(False), torch.no_grad():
            self._root(lambda: None)  # torch finds out here what is in which part
            self._root.reshard()
            sharded_parts: list[Any] = [part for part in self._root.modules() if isinstance(part, FSDPModule)]
            for part in sharded_parts:
                shards = list(part.parameters())
                part.unshard()
                self._gathered[part] = [
                    Gathered.of(whole, shard, names[id(shard)])
                    for shard, whole in zip(shards, part.parameters(), strict=True)
                    if whole is not shard
                ]
                part.reshard()
        self.parameters: list[nn.Parameter] = [gathered.shard for gathered in self.gathered]
        """The shards, also while the module has gathered parameters in their places."""
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        for gathered in self.gathered:
            if gathered.is_floating_point() or gathered.is_complex():
                gathered.requires_grad_().register_post_accumulate_grad_hook(self._note_use)
        for name, before in self._before.items():
            place, _, key = name.rpartition(".")
            owner, kept = self.module.get_submodule(place), cast(Any, before)
            if owner._parameters[key] is not before and type(before) is not Kept:
                before.data, before.grad = before.data.new_empty(0), None
                kept.__class__, kept.owner, kept.key = Kept, owner, key
        self.follow_flags()
        self._hooks = range(self._hooks.start, RemovableHandle.next_id)

    @property
    def gathered(self) -> list[Gathered]:
        """The gathered parameters; torch uses the same ones again, without memory in the meantime."""
        return [gathered for part in self._gathered.values() for gathered in part]

    def give_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Have optimizers that were made before train what is in the place of their parameters."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for i, parameter in enumerate(group["params"]):
                    if isinstance(parameter, Kept):
                        group["params"][i] = shard = parameter.now()
                        if parameter in optimizer.state:
                            optimizer.state[shard] = shard_entry(optimizer.state.pop(parameter), shard)

    def run(self, step: Callable[[], Any], backward_follows: bool) -> Any:
        """Run a step, for which the root's own parameters are gathered, until a backward pass ends if one follows."""
        self.release()
        if self.calls is not None:
            self.calls.begin((backward_follows, self._reduces))
        output: list[Any] = []
        self.in_step, self._is_announced = True, False
        try:
            self._root(lambda: output.append(step()))
        finally:
            self.in_step, self._is_announced = False, True
        self.put_back()
        if not backward_follows:
            self.release()
            if self.calls is not None:
                self.calls.end()
        return output[0]

    def release(self) -> None:
        """Release all that is gathered, also parts that are kept after their forward: outside of a step there are
        shards only, which callbacks may change and checkpoints contain."""
        self.put_back()
        self._root.reset_iter_state()

    def put_back(self) -> None:
        """Give the shards what was written to parameters that are gathered still."""
        for part in self._gathered:
            self._put_back(part)

    def _put_back(self, part: nn.Module, *_: Any) -> None:
        """The same of one part: a hook that runs before torch releases it."""
        for gathered in self._gathered.get(part, ()):
            if gathered.is_written:
                self.note(gathered.key, gathered)
                gathered.put_back()

    def verify_reduced(self) -> None:
        """Refuse gradients of this rank's own, before an optimizer steps without them."""
        _refuse_unreduced([gathered.key for gathered in self.gathered if gathered.own_grad is not None])

    def begin_backward(self, loss: Tensor) -> None:
        """Have the gradients that are left at the end of the loss's backward pass reduced."""
        self._is_announced = True
        self.put_back()
        if loss.requires_grad:
            self._announce_backward(loss)
        for gathered in self.gathered:
            gathered.in_backward = True

    def _announce_backward(self, output: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # nobody writes to the loss
            self._root(lambda: output)

    def finish_backward(self) -> None:
        """Note that the backward pass has ended."""
        self._is_announced = not self.in_step
        for gathered in self.gathered:
            gathered.in_backward = False

    def _note_use(self, gathered: Any) -> None:
        """Note that a parameter has a gradient, which torch will reduce: a hook of the gathered one."""
        if gathered.grad is None:  # frozen after the forward whose graph goes backward
            return
        if gathered.grad.layout is not torch.strided:
            raise ConfigError(
                f"fsdp: the gradient of {gathered.key} is sparse, and can't be cut over the ranks. Set sparse=False "
                "where the layer is made, or use strategy=ddp."
            )
        if not self._is_announced:
            _refuse_unreduced([gathered.key])
        self._used.add(id(gathered))

    def keep_root(self, keep: bool) -> None:
        """Keep the root's own parameters after a backward pass: a step with several goes on with them."""
        self._root.set_reshard_after_backward(not keep, recurse=False)

    def follow_flags(self) -> None:
        """Freeze and unfreeze what is gathered as its shards are."""
        for gathered in self.gathered:
            gathered.requires_grad_(gathered.shard.requires_grad)

    @contextmanager
    def written(self) -> Generator[None]:
        """Write to shards inside the block: what is gathered of them in a step goes there before, and follows after."""
        if not self.in_step or self._is_written:
            yield
            return
        with replaced(self, "_is_written", True):
            self.put_back()
            yield
        self._root.reset_iter_state()
        self._root.unshard()

    @torch.no_grad()
    def reduce_scalars(self) -> None:
        """Average the gradients of the parameters that every rank has whole; one that no rank has used has none."""
        trained = [parameter for parameter in self._scalars if parameter.requires_grad]
        if not trained:
            return
        own = [p.new_zeros((), dtype=torch.float64) if p.grad is None else p.grad.double() for p in trained]
        used = own[0].new_tensor([p.grad is not None for p in trained])
        sums = torch.cat([torch.stack(own), used])
        dist.all_reduce(sums)
        for i, parameter in enumerate(trained):
            if parameter.grad is not None or sums[len(trained) + i]:
                parameter.grad = (sums[i] / dist.get_world_size()).to(parameter.dtype)

    @contextmanager
    def without_reduction(self) -> Generator[None]:
        """Accumulate gradients on each rank inside the block."""
        self._root.set_requires_gradient_sync(False)
        try:
            with replaced(self, "_reduces", False):
                yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def recover(self) -> None:
        """Release everything after a failure within a step, unless the failure was that it can't be released."""
        with suppress(RuntimeError, AttributeError):
            self._root.reset_iter_state()

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that were accumulated without; gradients that are added later do not change these."""
        with torch.enable_grad():
            nothing = torch.zeros((), requires_grad=True) * 1
        self.begin_backward(nothing)
        nothing.backward()
        self.finish_backward()
        self.release()

    def take_unused(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by name, that had no gradient on this rank since this was last asked for."""
        trained = [gathered for gathered in self.gathered if gathered.shard.requires_grad]
        unused = {gathered.key: gathered.shard for gathered in trained if id(gathered) not in self._used}
        self._used.clear()
        return unused

    def put_together(self, optimizers: Sequence[Optimizer], keep: bool) -> None:
        """Make the module whole again on the first rank, or on each of them if all say so; all must call this."""
        whole: dict[Any, nn.Parameter] = {}
        for name, shard in list(self.module.named_parameters(remove_duplicate=False)):
            if shard not in whole:
                gradient, value = gather_tree((shard.grad, shard.detach()), keep)
                parameter = cast(Any, self._before.get(name, shard))  # a layer that is new has no shards
                if vars(parameter).pop("owner", None) is not None:  # kept from before
                    parameter.__class__ = nn.Parameter
                parameter = nn.Parameter(value) if parameter.is_meta or not keep else parameter
                parameter.grad = None
                parameter.data = value
                parameter.requires_grad_(shard.requires_grad)
                parameter.grad = gradient
                whole[shard] = parameter
            owner, _, key = name.rpartition(".")
            self.module.get_submodule(owner).register_parameter(key, whole[shard])
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [whole.get(parameter, parameter) for parameter in group["params"]]
            states = {whole.get(shard, shard): gather_tree(state, keep) for shard, state in optimizer.state.items()}
            optimizer.state.clear()
            optimizer.state.update(states)
        self._conversion.remove()
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.__class__ = type(part).__bases__[1]  # `fully_shard` has made a class of both
            for key in (REGISTRY_KEY, STATE_KEY):
                vars(part).pop(key, None)
            _module_state_mapping.pop(part, None)
            for parameter in part.parameters(recurse=False):
                vars(parameter).pop("_fsdp_orig_uid", None)
            for hooks in [value for key, value in vars(part).items() if key.endswith("_hooks")]:
                for number in self._hooks:
                    hooks.pop(number, None)
        for key in (_KEY, "__deepcopy__"):
            del vars(self.module)[key]


def _unless_gathered(follow: Callable[..., None], module: nn.Module, *args: Any) -> None:
    """Have torch follow what was loaded into shards; what is gathered gives its shards what was written to it."""
    if not any(isinstance(parameter, Gathered) for parameter in module.parameters(recurse=False)):
        follow(module, *args)


def _leave(flatten_parameters: Callable[[], None]) -> None:
    """Leave weights where they are gathered."""


def _refuse_unreduced(names: Sequence[str]) -> None:
    """Refuse gradients that a step has computed without having them averaged over the ranks."""
    if names:
        raise ConfigError(
            f"fsdp: training_step computed gradients of {', '.join(names[:3])} from this rank's samples alone. Compute "
            "them by self.manual_backward(loss), which averages them over the ranks; if its loss has gradients of "
            "torch.autograd.grad in it, set strategy.shard=[]. Or set strategy=single_device."
        )


def _refuse_copy(module: nn.Module, memo: Any) -> None:
    raise ConfigError(
        f"fsdp: {type(module).__name__} is cut over the ranks, so that it can't be copied (copy.deepcopy), as a "
        "callback or a hook tries to. Copy it in __init__; for a second run with such a callback, make the module anew."
    )
