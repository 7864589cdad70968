"""Compute with shards in hooks what needs no other rank's elements, and refuse the rest by name.

Outside of steps parameters, gradients and optimizer state are shards (torch's `DTensor`). Torch answers some calls with
them with what one rank has (`weight.norm().item()`) or writes to a copy (`weight[3].fill_(0)`). So during a run:

| call | example | computed with |
|---|---|---|
| elementwise, with tensors that are cut alike | `average.lerp_(weight, 0.1)` | shards |
| elementwise in place, with whole tensors of its shape | `weight.mul_(mask)`, `weight.data = start` | shards |
| the norm or the sum of a tensor, `torch.equal` | `weight.norm()` | shards, whose results are combined |
| elementwise in place, on a whole tensor | `buffer.add_(weight)` | gathered tensors |
| any other | `weight[0]`, `weight.mean()` | refused; `weight.full_tensor()` is the whole |
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from ..core.errors import ConfigError
from .gathered import verify_data
from .sharded_module import ShardedModule
from .whole import norms_of, shard_like

_ELEMENTWISE = frozenset((
    "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "clip", "clone", "conj", "copy",
    "copysign", "div", "empty_like", "eq", "exp", "exp2", "expm1", "fill", "floor", "full_like", "ge", "gt", "iadd",
    "idiv", "imul", "isfinite", "isinf", "isnan", "isub", "itruediv", "le", "lerp", "log", "log1p", "logical_not",
    "lt", "masked_fill", "maximum", "minimum", "mul", "nan_to_num", "ne", "neg", "negative", "ones_like", "pow",
    "radd", "rdiv", "reciprocal", "rmul", "round", "rsqrt", "rsub", "rtruediv", "sgn", "sigmoid", "sign", "sqrt",
    "square", "sub", "tanh", "true_divide", "truediv", "view_as_complex", "view_as_real", "where", "zero",
    "zeros_like",
))  # fmt: skip
"""Functions and methods, without underscores, of which each element of the result depends on one of each tensor."""
_AS_THEY_ARE = frozenset((
    "__deepcopy__", "__delete__", "__dir__", "__format__", "__hash__", "__repr__",
    "_has_compatible_shallow_copy_type", "_is_view", "backward", "data_ptr", "detach", "detach_", "dim",
    "element_size", "get_device", "grad", "is_complex", "is_conj", "is_contiguous", "is_floating_point",
    "is_inference", "is_neg", "is_pinned", "is_shared", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "stride", "to",
    "untyped_storage",
))  # fmt: skip
"""Methods that read no element, and those that act on the tensor itself."""
_OF_LISTS = ("_foreach", "_fused", "_amp_foreach")
_COMPUTED = frozenset(("H", "T", "imag", "mH", "mT", "real"))
"""Attributes that are views of elements."""

OUTSIDE = (
    "fsdp: a step uses a parameter of a part outside of the part's forward, where only this rank's shard of it is "
    "there. Leave the part out of strategy.shard, so that it is gathered for the whole step, or set "
    "strategy.shard=[] to gather all."
)


class ShardCalls:
    """Decides what calls with shards compute, from its creation to `close`.

    While the module of `shards` runs a step, a shard that needs a gradient can't be used.
    """

    def __init__(self, shards: ShardedModule, verify_together: Any) -> None:
        self._shards, self._verify_together = shards, verify_together
        self._own: Any = vars(DTensor)["__torch_function__"]
        setattr(DTensor, "__torch_function__", staticmethod(self._call))  # noqa: B010  # declared otherwise

    def close(self) -> None:
        """Leave calls with shards to torch again."""
        setattr(DTensor, "__torch_function__", self._own)  # noqa: B010

    def _call(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = func.__name__
            if name == "__set__":
                return self._set(func, *args)
            if name in _AS_THEY_ARE or (name == "__get__" and func.__self__.__name__ not in _COMPUTED):
                return func(*args, **kwargs)
            writes = _writes(name, kwargs) and ("out" in kwargs or not (args and _is_whole(args[0])))
            with self._shards.written() if self._shards.in_step and writes else nullcontext():
                return self._computed(func, name, args, kwargs)

    def _set(self, func: Any, tensor: Tensor, value: Any) -> None:
        """Set an attribute; of `data` torch would set the wrapper's alone."""
        attribute = func.__self__.__name__
        if attribute == "data":
            verify_data(tensor, value)
            self._call(Tensor.copy_, (), (tensor.detach(), value))
        elif attribute == "grad" and value is not None and not _cut_alike([tensor, value]):
            raise _refusal("grad = ")
        else:
            func(tensor, value)

    def _computed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        of_lists = name.startswith(_OF_LISTS)
        if of_lists and len({isinstance(tensor, DTensor) for tensor in args[0]}) == 2:
            return self._apart(func, name, args, kwargs)
        given = _tensors([*args, *kwargs.values()])
        in_graph = self._shards.in_step and torch.is_grad_enabled()
        if in_graph and any(isinstance(tensor, DTensor) and tensor.requires_grad for tensor in given):
            raise ConfigError(OUTSIDE)
        if (of_lists and not name.endswith(("_norm", "_max"))) or name.strip("_") in _ELEMENTWISE:
            if not of_lists and _writes(name, kwargs) and isinstance(shard := args[0], DTensor):
                args, kwargs = tree_map_only(
                    Tensor, lambda t: shard_like(t, shard) if t.dim() and t.shape == shard.shape else t, (args, kwargs)
                )
                given = _tensors([*args, *kwargs.values()])
            if _cut_alike(given, of_lists):
                return func(*args, **kwargs)
            if not of_lists and _writes(name, {}) and _is_whole(args[0]):
                self._verify_together()
                return func(*tree_map_only(DTensor, DTensor.full_tensor, args), **kwargs)
        if name == "equal" and (args[0].shape != args[1].shape or _cut_alike(given)):  # torch asks all ranks
            self._verify_together()
            return args[0].shape == args[1].shape and func(*args)
        plain = {"sum": (None, False), "norm": (1, 2, "fro", None, False)}.get(name.removeprefix("linalg_vector_"), ())
        options = [*args[1:], *kwargs.values()]
        # one number of a whole tensor, which can be made of its shards' numbers
        if plain and all(one in plain and one is not True for one in options) and _cut_alike(given):
            self._verify_together()
            return func(*args, **kwargs).full_tensor()
        if name == torch._foreach_norm.__name__ and args[1:] in ((), (1,), (2,)) and _cut_alike(given, True):
            self._verify_together()
            return norms_of(args[0], *args[1:])
        raise _refusal(name)

    def _apart(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of lists with the shards in them, and with the tensors that every rank has whole."""
        num, found = len(args[0]), dict[int, Any]()
        for are_shards in (True, False):
            places = [i for i, tensor in enumerate(args[0]) if isinstance(tensor, DTensor) is are_shards]
            lists = [[v[i] for i in places] if isinstance(v, (list, tuple)) and len(v) == num else v for v in args]
            result = self._computed(func, name, tuple(lists), kwargs) if are_shards else func(*lists, **kwargs)
            found |= zip(places, result or (), strict=False)
        return [found[i] for i in range(num)] if found else None


def _refusal(call: str) -> ConfigError:
    return ConfigError(
        f"fsdp: `{call}` is called with a parameter, gradient or optimizer state, of which this rank has only a "
        "shard. Call it with tensor.full_tensor(), on all ranks; write by tensor.copy_(values), save by "
        "trainer.save_checkpoint, or choose strategy=ddp."
    )


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes to what it is given: `mul_`, `__imul__`, `out=`."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or "out" in kwargs or name == "__setitem__" or name.startswith("__i")


def _is_whole(value: Any) -> bool:
    """Whether a value is a tensor that this rank has whole, such as what is gathered in a step."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _tensors(values: list[Any]) -> list[Any]:
    if any(isinstance(value, (list, tuple, dict)) for value in values):  # torch's trees take longer
        values = tree_leaves(values)
    return [value for value in values if isinstance(value, Tensor)]


def _cut_alike(tensors: list[Any], are_lists: bool = False) -> bool:
    """Whether shards have what each other needs: all are cut, in the same rows."""
    cut = [tensor for tensor in tensors if tensor.dim()]
    if not all(isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], Shard) for tensor in cut):
        return False
    return are_lists or len({(tensor.shape, tensor.placements, tensor.device_mesh) for tensor in cut}) == 1


def verify_plain(output: Any) -> None:
    """Refuse a loss whose gradients would not be averaged over the ranks: of shards, or from passes in a hook."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if isinstance(loss, DTensor):
        raise ConfigError(OUTSIDE)
    if isinstance(loss, Tensor) and loss.is_leaf and loss.requires_grad and not isinstance(loss, nn.Parameter):
        raise ConfigError(
            "fsdp: the loss has no graph, so that hooks compute the gradients, in backward passes of their own that "
            "no rank averages. Call self.manual_backward for each of these (automatic_optimization=False), or use "
            "strategy=ddp."
        )


class LateParameters:
    """Refuses parameters that a module is given after it was cut: no rank would gather or reduce them."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._may_be_there = module, False
        self._known = set(map(id, module.parameters()))
        register = (register_module_parameter_registration_hook, register_module_module_registration_hook)
        self.handles = [one(lambda *_: setattr(self, "_may_be_there", True)) for one in register]

    def verify(self) -> None:
        """Look at the module between steps, if anything was registered in any module since the last look."""
        if self._may_be_there:
            self._may_be_there = False
            late = [name for name, p in self._module.named_parameters() if id(p) not in self._known]
            if late:
                raise ConfigError(
                    f"fsdp: {', '.join(late)} was added, or replaced by another parameter, after the module was cut "
                    "over the ranks. Do so in __init__ or configure_model, or write to it: p.data.copy_(values)."
                )
