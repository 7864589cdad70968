"""Compute with whole tensors where hooks find shards, as one device does.

Outside of steps parameters, gradients and optimizer state are shards (torch's `DTensor`). Torch refuses some calls with
them, and answers others with what one rank has (`weight.norm().item()`) or writes to a copy (`weight[3].fill_(0)`). So
during a run each call with a shard is computed in one of these ways:

| call | example | computed with |
|---|---|---|
| elementwise, with tensors that are cut alike | `average.lerp_(weight, 0.1)` | shards |
| the norm or the sum of a tensor | `weight.norm()` | shards, whose results are summed |
| any other | `buffer.add_(weight)`, `weight.mul_(mask)`, `weight[0]` | whole tensors, gathered for the call |

What a call has written to a whole tensor goes back to its shards. Its views, such as `weight[0]`, are gathered anew
whenever they are used, so that they always have, and change, the values of the shards.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from ..core.errors import ConfigError
from ..core.private import of_torch
from ._fsdp2 import local_part
from .refusals import OF_ELEMENTS, OUTSIDE, PICKLED, SHARES_MEMORY, verify_shape
from .sharded_module import ShardedModule
from .whole import shard_like

_ELEMENTWISE = frozenset((
    "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "clip", "clone", "conj", "copy",
    "copysign", "div", "empty_like", "eq", "exp", "exp2", "expm1", "fill", "floor", "full_like", "ge", "gt", "iadd",
    "idiv", "imul", "isfinite", "isinf", "isnan", "isub", "itruediv", "le", "lerp", "log", "log1p", "logical_not",
    "lt", "masked_fill", "maximum", "minimum", "mul", "nan_to_num", "ne", "neg", "negative", "ones_like", "pow",
    "radd", "rdiv", "reciprocal", "rmul", "round", "rsqrt", "rsub", "rtruediv", "sgn", "sigmoid", "sign", "sqrt",
    "square", "sub", "tanh", "true_divide", "truediv", "where", "zero", "zeros_like",
))  # fmt: skip
"""Functions and methods, without underscores, of which each element of the result depends on one of each tensor."""
_AS_THEY_ARE = frozenset((
    "__deepcopy__", "__delete__", "__dir__", "__format__", "__hash__", "__repr__", "_is_view", "backward", "data_ptr",
    "detach", "detach_", "dim", "element_size", "get_device", "grad", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_shared", "ndimension", "nelement", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset",
    "stride", "untyped_storage",
))  # fmt: skip
"""Methods that read no element, and those that act on the tensor itself."""
_OF_LISTS = ("_foreach", "_fused", "_amp_foreach")
_COMPUTED = frozenset(("H", "T", "imag", "mH", "mT", "real"))
"""Attributes that are views of elements."""
_LAYOUT = frozenset(("device", "dtype", "is_cuda", "is_leaf", "layout", "ndim", "shape"))
"""Attributes that a view has without the whole."""
_RANDOM = ("bernoulli", "cauchy", "dropout", "exponential", "geometric", "multinomial", "normal", "rand", "uniform")


class WholeCalls:
    """Computes calls with shards as one device does, from its creation to `close`.

    Args:
        shards: the module that is trained; while it runs a step, a shard that needs a gradient can't be used.
        note: receives whole tensors that are assigned as gradients, which must be the same on all ranks.
    """

    def __init__(self, shards: ShardedModule, note: Callable[[str, Tensor], None]) -> None:
        self._shards, self._note = shards, note
        self._assigned: dict[int, torch.UntypedStorage] = {}
        self._own: Any = vars(DTensor)["__torch_function__"]
        setattr(DTensor, "__torch_function__", staticmethod(self._call))  # noqa: B010  # declared otherwise
        ShardView.shards = shards

    def close(self) -> None:
        """Leave calls with shards to torch again."""
        setattr(DTensor, "__torch_function__", self._own)  # noqa: B010
        ShardView.shards = None

    def _call(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with of_torch.DisableTorchFunctionSubclass():
            name = func.__name__
            if name in _AS_THEY_ARE or (name == "__get__" and func.__self__.__name__ not in _COMPUTED):
                return func(*args, **kwargs)
            if name == "__set__":
                return self._assign(func, *args)
            if name == "__reduce_ex__":
                raise ConfigError(PICKLED)
            with self._shards.written() if self._shards.in_step and _writes(name, kwargs) else nullcontext():
                return self._computed(func, name, args, kwargs)

    def _computed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _tensors([*args, *kwargs.values()])
        if _is_elementwise(name) and _cut_alike(given, are_lists=name.startswith(_OF_LISTS)):
            return func(*args, **kwargs)
        in_graph = self._shards.in_step and torch.is_grad_enabled()
        if in_graph and any(isinstance(tensor, DTensor) and tensor.requires_grad for tensor in given):
            raise ConfigError(OUTSIDE)
        if _is_sum(name, args, kwargs) and _cut_alike(given):
            return func(*args, **kwargs).full_tensor()
        is_norms = name == of_torch.foreach_norm.__name__ and args[1:] in ((), (1,), (2,))
        if is_norms and _cut_alike(given, are_lists=True):
            return norms(args[0], *args[1:])
        return computed_whole(func, args, kwargs)

    def _assign(self, func: Any, tensor: DTensor, value: Any) -> None:
        """Set an attribute; tensors that are assigned are cut as the one that they belong to."""
        attribute = func.__self__.__name__
        given = value
        if isinstance(value, Tensor) and attribute in ("data", "grad"):
            verify_shape(attribute, tensor, value)
            if attribute == "grad" and not isinstance(value, (DTensor, ShardView)):
                self._note("a parameter", value)
            if not _cut_alike([tensor, value]):
                value = shard_like(_whole_of(value, {}), tensor).clone()
        if attribute != "data":
            func(tensor, value)
            return
        memory = local_part(given).untyped_storage()
        self._shards.assign(tensor, value)
        if of_torch.cdata(memory) == of_torch.cdata(local_part(tensor).untyped_storage()):
            self._assigned.pop(id(tensor), None)
        else:
            self._assigned[id(tensor)] = memory

    def verify_unshared(self) -> None:
        """Refuse to train parameters whose `.data` is, on one device, memory that is used elsewhere.

        Raises:
            ConfigError: there is one.
        """
        while self._assigned:
            _, memory = self._assigned.popitem()
            if of_torch.storage_use_count(memory) > 1:
                raise ConfigError(SHARES_MEMORY)


@dataclass
class _Gathered:
    """A whole tensor during a call, and the shards that it is of."""

    source: DTensor
    whole: Tensor
    version: int

    def put_back(self, from_first: bool) -> None:
        """Give the shards what the call has written, or rank 0's values where ranks have drawn different ones."""
        if self.whole._version == self.version:
            return
        whole = self.whole.detach()
        if from_first:
            dist.broadcast(whole, 0)
        with torch.no_grad():
            self.source.detach().copy_(shard_like(whole, self.source))


class ShardView(Tensor):
    """A view of a sharded tensor, without memory: the whole is gathered when the view is used."""

    source: DTensor
    shards: ClassVar[ShardedModule | None] = None
    """The module that is trained."""

    @staticmethod
    def of(source: DTensor, view: Tensor) -> "ShardView":
        """Make a view of a sharded tensor.

        Args:
            view: the same view of the whole tensor.
        """
        make: Callable[..., ShardView] = of_torch.make_wrapper_subclass(Tensor)
        layout: dict[str, Any] = {"strides": view.stride(), "storage_offset": view.storage_offset()}
        made = make(ShardView, view.size(), **layout, dtype=view.dtype, device=view.device)
        made.source = source if view.requires_grad else cast(DTensor, source.detach())
        return made

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with of_torch.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__" and func.__self__.__name__ in _LAYOUT:
                return func(*args, **(kwargs or {}))
            shards = cls.shards
            with shards.written() if shards is not None and _writes(func.__name__, kwargs or {}) else nullcontext():
                return computed_whole(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute what C++ calls without calling `__torch_function__` first."""
        return computed_whole(func, args, kwargs or {})


def computed_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with whole tensors in the place of shards; all ranks must call it alike."""
    gathered: dict[Any, _Gathered] = {}
    args, kwargs = of_torch.tree_map_only(Tensor, lambda tensor: _whole_of(tensor, gathered), (args, kwargs))
    output = func(*args, **kwargs)
    is_random = any(word in func.__name__ for word in _RANDOM)
    for each in gathered.values():
        each.put_back(is_random)

    def returned(tensor: Tensor) -> Tensor:
        for each in gathered.values():
            if tensor is each.whole:
                return each.source
            if of_torch.cdata(tensor.untyped_storage()) == of_torch.cdata(each.whole.untyped_storage()):
                return ShardView.of(each.source, tensor)
        if is_random:
            dist.broadcast(tensor, 0)
        return tensor

    if type(output).__name__ == "ndarray":
        output.flags.writeable = False  # it shares the memory of a copy
        return output
    return of_torch.tree_map_only(Tensor, returned, output)


def _whole_of(tensor: Tensor, gathered: dict[Any, _Gathered]) -> Tensor:
    if isinstance(tensor, ShardView):
        whole = _whole_of(tensor.source, gathered)
        if whole.is_complex() and not tensor.dtype.is_complex:
            whole = torch.view_as_real(whole)  # whose strides and offset the view has
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if not isinstance(tensor, DTensor):
        return tensor
    if of_torch.is_dispatch_key_excluded("Python"):
        raise ConfigError(OF_ELEMENTS)
    own = local_part(tensor)  # a gradient may share its storage with others
    key = (of_torch.cdata(own.untyped_storage()), own.storage_offset(), tensor.shape, tensor.requires_grad)
    if key not in gathered:
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            whole = tensor.full_tensor().contiguous()
            if of_torch.cdata(whole.untyped_storage()) == key[0]:  # of one rank
                whole = whole.clone()
        gathered[key] = _Gathered(tensor, whole, whole._version)
    return gathered[key].whole


@torch.no_grad()
def norms(tensors: list[DTensor], norm_type: float = 2) -> list[Tensor]:
    """The norms of sharded tensors, of which each rank sends its shards' norms alone."""
    own = torch.stack(of_torch.foreach_norm([local_part(tensor) for tensor in tensors], norm_type))
    mesh = tensors[0].device_mesh
    found = [torch.empty_like(own) for _ in range(mesh.size(mesh.ndim - 1))]
    dist.all_gather(found, own, group=mesh.get_group(mesh.ndim - 1))
    return list(torch.linalg.vector_norm(torch.stack(found), norm_type, dim=0).unbind())


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes to what it is given: `mul_`, `__setitem__`, `__imul__`, `out=`."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or "out" in kwargs or name == "__setitem__" or name.startswith("__i")


def _is_elementwise(name: str) -> bool:
    of_lists = name.startswith(_OF_LISTS) and not name.endswith(("_norm", "_max"))
    return of_lists or name.strip("_") in _ELEMENTWISE


def _tensors(values: list[Any]) -> list[Any]:
    if any(isinstance(value, (list, tuple, dict)) for value in values):  # torch's trees take longer
        values = of_torch.tree_leaves(values)
    return [value for value in values if isinstance(value, Tensor)]


def _cut_alike(tensors: list[Any], are_lists: bool = False) -> bool:
    """Whether shards have what each other needs: all are cut, in the same rows."""
    cut = [tensor for tensor in tensors if tensor.dim()]
    if not all(isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], Shard) for tensor in cut):
        return False
    return are_lists or len({(tensor.shape, tensor.placements, tensor.device_mesh) for tensor in cut}) == 1


def _is_sum(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes one number of a whole tensor, which can be made of its shards' numbers."""
    options = [*args[1:], *kwargs.values()]
    if name == "sum":
        return not options
    return name in ("norm", "linalg_vector_norm") and all(option in (1, 2) for option in options)
