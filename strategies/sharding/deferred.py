"""Build a module without its large tensors, and compute these one by one afterwards, with the same values.

Within `DeferredTensors` large tensors are torch's fake ones, without memory, and what is done to them is recorded. (On
the meta device `torch.nn.init` would leave out what it does.) A random operation keeps the generator's state before it,
and draws once, into a temporary tensor, so that the random stream goes on as if the tensor had been there. `value`
repeats the operations that one tensor depends on.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ..core.errors import ConfigError
from ..core.rng import generator_state, swapped_generator
from .refusals import without_values
from .whole import apply_anew

LARGE = 4096
"""Number of elements from which a tensor is deferred; smaller ones are made at once."""


class _Operation(NamedTuple):
    """An operation on deferred tensors, with the state of the generator that it draws from."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    device: torch.device
    random: Tensor | None


class DeferredTensors(TorchDispatchMode):
    """Records the operations on large tensors inside the block.

    Raises:
        ConfigError: the shape of a tensor depends on the values of a deferred one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._operations: list[_Operation] = []
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: what `to_meta` has made, and of which
        self._devices: dict[int, torch.device] = {}

    def __enter__(self) -> "DeferredTensors":
        self._own_apply = nn.Module._apply
        nn.Module._apply = apply_anew  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        nn.Module._apply = self._own_apply
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        deferred = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
        if deferred:
            device = self._devices[_memory_of(deferred[0])]
        elif not given and _takes(func, "device"):
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type == "meta" or _numel(func, args, kwargs) < LARGE:
                return func(*args, **kwargs)
        else:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(self.value(args[0]))  # the number decides what the module does next
        return self._record(func, args, kwargs, device, given)

    def _record(self, func: Any, args: Any, kwargs: Any, device: torch.device, given: list[Tensor]) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        random = generator_state(device) if draws else None
        if draws:
            func(*tree_map_only(Tensor, _like, args), **kwargs)
        try:
            with self._fake:
                output = func(*args, **kwargs)
        except (UnsupportedFakeTensorException, DynamicOutputShapeException, DataDependentOutputException) as exc:
            raise ConfigError(
                f"fsdp: the shape of what configure_model computes ({func}) depends on values of its layers, which "
                "are not there yet. Build the layers only, or build them in __init__, where every process holds all."
            ) from exc
        outputs = _kept(list(_tensors(output)))
        if not given and isinstance(output, Tensor) and _takes(func, "dtype"):
            kwargs = {**kwargs, "dtype": output.dtype}  # torch's default may be another one when it is repeated
        new = [view for view in outputs if _memory_of(view) not in self._devices]
        if new or func._schema.is_mutable:
            self._operations.append(_Operation(func, _kept(args), _kept(kwargs), outputs, device, random))
        self._devices.update({_memory_of(view): device for view in new})
        return output

    def value(self, tensor: Tensor) -> Tensor:
        """Compute a tensor of the block, or what `to_meta` has put in its place, where it would have been."""
        tensor = self._fakes.get(_memory_of(tensor), (tensor, tensor))[1]
        if not isinstance(tensor, FakeTensor) or _memory_of(tensor) not in self._devices:
            raise ConfigError(without_values("a parameter"))
        memory: dict[int, Tensor] = {}
        for operation in self._needed(_memory_of(tensor)):
            _run(operation, memory)
        return _real(tensor, memory)

    def to_meta(self, module: nn.Module) -> None:
        """Replace the deferred parameters and buffers of a module by tensors on the meta device."""

        def meta_of(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return tensor
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            self._fakes[_memory_of(meta)] = (meta, tensor)
            return meta

        apply_anew(module, meta_of)

    def _needed(self, key: int) -> list[_Operation]:
        """The operations that the values in a storage depend on, in order."""
        wanted, needed = {key}, list[_Operation]()
        for operation in reversed(self._operations):
            if not wanted.isdisjoint(map(_memory_of, operation.outputs)):
                needed.append(operation)
                wanted |= {_memory_of(t) for t in _tensors((operation.args, operation.kwargs))}
        return needed[::-1]


def _run(operation: _Operation, memory: dict[int, Tensor]) -> None:
    args, kwargs = tree_map_only(FakeTensor, lambda view: _real(view, memory), (operation.args, operation.kwargs))
    random = operation.random
    with nullcontext() if random is None else swapped_generator(operation.device, random):
        output = operation.function(*args, **kwargs)
    for view, real in zip(operation.outputs, _tensors(output), strict=True):
        memory.setdefault(_memory_of(view), real)


def _real(view: Tensor, memory: dict[int, Tensor]) -> Tensor:
    return memory[_memory_of(view)].as_strided(view.size(), view.stride(), int(view.storage_offset()))


def _memory_of(tensor: Tensor) -> int:
    """What tells one tensor's memory from another's as long as one of its tensors is there."""
    return tensor.untyped_storage()._cdata


def _kept(tree: Any) -> Any:
    """The tensors in arguments as they are now: a fake one may be resized, another one written to."""
    return tree_map_only(Tensor, lambda t: t.detach() if isinstance(t, FakeTensor) else t.detach().clone(), tree)


def _takes(func: Any, name: str) -> bool:
    return name in {argument.name for argument in func._schema.arguments}


def _numel(func: Any, args: Any, kwargs: Any) -> int:
    output = func(*args, **{**kwargs, "device": torch.device("meta")})
    return sum(tensor.numel() for tensor in _tensors(output))


def _like(tensor: Tensor) -> Tensor:
    """Memory without values, as a tensor would have."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (value for value in tree_flatten(tree)[0] if isinstance(value, Tensor))
