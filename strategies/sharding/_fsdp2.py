"""Every private name of torch's FSDP2 that this project uses.

FSDP2 gathers a module's parameters in hooks around its forward. A LightningModule is not called as a whole: a step
calls its parts, in any way it likes. So here the root's own parameters are gathered when a step begins and released
when it, or its backward pass, has ended; the parts keep torch's hooks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..core.errors import ConfigError
from ..core.private import of_torch, put
from .refusals import ASSIGNED, refuse_sparse, refuse_unreduced, verify_shape
from .whole import shard_like


class ParameterGroup:
    """Parameters that are gathered together, and their gradients reduced together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.note: Callable[[str, Tensor], None] = lambda name, value: None
        """Receives the name and the value of a gathered parameter that was written to."""
        self.reduces = False
        """Whether torch is reducing the gradients."""
        self.is_announced = True
        """Whether a backward pass may have gradients: its loss is weighted by the rank's samples."""
        self.used: set[int] = set()
        """Indices of the parameters that had a gradient in the last backward pass."""
        self._after_backward: Callable[..., Any] = group.post_backward
        group.post_backward = self._post_backward
        for parameter in group.fsdp_params:
            parameter.free_unsharded_param = partial(_free_gathered, parameter)
            parameter.to_unsharded = partial(_gather, self, parameter, parameter.to_unsharded)
            parameter.to_sharded = partial(_release, self, parameter, parameter.to_sharded)

    def release(self) -> None:
        """Put the shards back in the place of gathered parameters; forget the last forward, if no backward follows."""
        self._group._to_sharded()
        self._group._post_forward_indices.clear()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards, as the module and its optimizers have them."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    def put_back(self) -> None:
        """Give the shards what was written to gathered parameters."""
        for parameter in self._group.fsdp_params:
            _put_back(self, parameter)

    def note_writes(self) -> None:
        """Note what was written to parameters that are gathered still."""
        for parameter in self._group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if _is_written(gathered):
                self.note(parameter._param_fqn or "a parameter", gathered)

    def unreduced(self) -> list[str]:
        """Names of the gathered parameters with gradients that were not reduced."""
        gathered = [(p._param_fqn, getattr(p, "_unsharded_param", None)) for p in self._group.fsdp_params]
        return [name or "" for name, one in gathered if isinstance(one, _Gathered) and one.own_grad is not None]

    def replaced(self) -> list[str]:
        """Names of the parameters in whose place the module has others."""
        found = list[str]()
        for parameter in self._group.fsdp_params:
            place = parameter._module_info
            now = place.module._parameters.get(place.param_name)
            if now is not parameter.sharded_param and now is not getattr(parameter, "_unsharded_param", None):
                found.append(parameter._param_fqn or place.param_name)
        return found

    @property
    def names(self) -> list[str]:
        """The parameters' names in the root."""
        return [parameter._param_fqn or "" for parameter in self._group.fsdp_params]

    def follow_flags(self) -> None:
        """Give gathered parameters the `requires_grad` of their shards, as torch does when they are gathered."""
        for parameter in self._group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and gathered.requires_grad != parameter.sharded_param.requires_grad:
                gathered.requires_grad_(parameter.sharded_param.requires_grad)

    def _post_backward(self, *args: Any) -> None:
        self.reduces = True
        used = list[int]()
        for i, parameter in enumerate(self._group.fsdp_params):
            gathered = getattr(parameter, "_unsharded_param", None)
            gradient: Tensor | None = getattr(gathered, "grad", None)
            if gradient is not None and gradient.layout is not torch.strided:
                refuse_sparse(self.names[i])
            if parameter.unsharded_accumulated_grad is not None or gradient is not None:
                used.append(i)
        if not self.is_announced:
            refuse_unreduced([self.names[i] for i in used])
        self.used.update(used)
        self._after_backward(*args)
        self.reduces = False

    def assign(self, shard: Any, value: Any) -> bool:
        """Give a parameter that is not gathered the memory of another shard; False if it is of another group."""
        for parameter in self._group.fsdp_params:
            if parameter.sharded_param is shard:
                place = parameter._module_info
                if place.module._parameters.get(place.param_name) is not shard:
                    raise ConfigError(ASSIGNED)
                set_local_part(shard, value)
                own, num = value._local_tensor, parameter.padded_sharded_param_size.numel()
                if own.untyped_storage().nbytes() == num * own.itemsize:  # it was a parameter's, with its padding
                    parameter._sharded_param_data = own.as_strided((num,), (1,), 0)
                parameter.reset_sharded_param()
                set_local_part(value, shard)  # it may have been padded
                return True
        return False


class RootState:
    """Gathers and releases the parameters that the root of a module cut by `fully_shard` holds itself."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._state: Any = cast(FSDPModule, root)._get_fsdp_state()
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        self.groups = [ParameterGroup(group) for group in _groups(root)]

    @property
    def replaced(self) -> list[str]:
        """Names of the parameters in whose place the module has others."""
        return [name for group in self.groups for name in group.replaced()]

    def prime(self) -> None:
        """Find out which group each parameter is in; from then on they must have memory."""
        self._state._lazy_init()

    def begin_forward(self) -> None:
        """Gather the root's own parameters, and announce that its parts are called."""
        cast(FSDPModule, self._root).reshard()
        self._state._state_ctx.iter_forward_root = None
        self._state._training_state = _idle()
        for group in self._state._fsdp_param_groups:
            group._training_state = _idle()
        self._state._pre_forward(self._root, (), {})

    def gather_again(self) -> None:
        """Gather the root's own parameters again in a step, whose shards were written to."""
        root, groups = cast(FSDPModule, self._root), self._state._fsdp_param_groups
        before = [group._training_state for group in groups]
        for group in groups:
            group._training_state = _idle()  # torch would keep them in forward
        root.reshard()
        root.unshard()
        for group, state in zip(groups, before, strict=True):
            group._training_state = state

    def end_forward(self, output: Any) -> None:
        """Announce that no more parts are called; the root's own parameters stay for a backward pass of the output."""
        self._state._post_forward(self._root, None, output)

    def release(self) -> None:
        """Release all that is gathered, and forget the order of the forward passes, which no backward pass follows."""
        for group in self.groups:
            group.release()
        self._state._comm_ctx.post_forward_order.clear()

    def begin_backward(self, gradient: Tensor) -> Tensor:
        """Announce a backward pass, at whose end all gradients that are left are reduced: a hook for the loss."""
        return self._state._pre_backward(gradient)

    def finish_backward(self) -> None:
        """Reduce the gradients that are left."""
        self._state._root_post_backward_final_callback()


class _Gathered(nn.Parameter):
    """A gathered parameter, which tells whether it may have been written to, and has the gradient of its shard.

    A write raises its version; one through `.data` does not, so that reading that counts as a write.
    """

    touched: bool
    seen: int
    own_data: Tensor | None
    """What torch gathers the values to, while `.data` is set to another tensor."""
    group: ParameterGroup
    shard: nn.Parameter

    @property
    def own_grad(self) -> Tensor | None:
        """What a backward pass of this rank has added, until torch reduces it."""
        return _GRAD.__get__(self)

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # as `data`
        own = self.own_grad
        return self.shard.grad if own is None and not self.group.reduces else own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self.group.reduces:
            self.shard.grad = value
            value = None
        _GRAD.__set__(self, value)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute, to torch's stubs
        self.touched = True
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        verify_shape("data", self, value)
        self.touched = True
        if self.own_data is None:
            self.own_data = _DATA.__get__(self)
        _DATA.__set__(self, value)


_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad


def _gather(group: ParameterGroup, parameter: Any, own: Callable[[], None]) -> None:
    own()
    gathered = parameter._unsharded_param
    gathered.__class__ = _Gathered
    gathered.group, gathered.shard = group, parameter.sharded_param
    gathered.touched, gathered.seen, gathered.own_data = False, gathered._version, None
    hooks = of_torch.backward_hooks(parameter.sharded_param)
    if hooks is not None and hooks is not of_torch.backward_hooks(gathered):
        put(gathered, backward_hooks=hooks)  # the gathered one is what autograd knows


def _is_written(gathered: Any) -> TypeGuard["_Gathered"]:
    return isinstance(gathered, _Gathered) and (gathered.touched or gathered._version != gathered.seen)


def _put_back(group: ParameterGroup, parameter: Any) -> None:
    """Give a parameter's shard what was written to the gathered one."""
    gathered = getattr(parameter, "_unsharded_param", None)
    if _is_written(gathered):
        shard = parameter.sharded_param.detach()
        group.note(parameter._param_fqn or "a parameter", gathered)
        with torch.no_grad():
            shard.copy_(shard_like(gathered.detach(), shard))
        gathered.touched, gathered.seen = False, gathered._version


def _release(group: ParameterGroup, parameter: Any, own: Callable[[], None]) -> None:
    _put_back(group, parameter)
    gathered = getattr(parameter, "_unsharded_param", None)
    if isinstance(gathered, _Gathered) and gathered.own_data is not None:
        _DATA.__set__(gathered, gathered.own_data)
        gathered.own_data = None
    own()


def _free_gathered(parameter: Any) -> None:
    """Free the memory of a gathered parameter, unless a numpy array shares it: torch can't resize it then."""
    for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
        if tensor.untyped_storage().resizable():
            tensor.untyped_storage().resize_(0)


def _groups(root: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                yield from state._fsdp_param_groups


def _idle() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    return TrainingState.IDLE


def forget_sharding(part: nn.Module) -> None:
    """Give a module its own class again, and take away what `fully_shard` has noted on it and its parameters."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    if isinstance(part, FSDPModule):
        part.__class__ = type(part).__bases__[1]  # `fully_shard` has made a class of both
    for key in (REGISTRY_KEY, STATE_KEY):
        vars(part).pop(key, None)
    for parameter in part.parameters(recurse=False):
        vars(parameter).pop("_fsdp_orig_uid", None)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded, itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_local_part(tensor: Any, source: Any) -> None:
    """Have a sharded tensor share the memory of another."""
    tensor._local_tensor = source._local_tensor
