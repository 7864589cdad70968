"""Run a part of a module so that its activations are computed once more in the backward pass, instead of kept.

The second run must repeat the first one exactly, and leave no trace. So the first one notes what it reads (random
states, attributes, small buffers, the default dtype), and the second one runs with that, and puts back what it found.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..core.errors import ConfigError
from ..core.patching import refill
from ..core.rng import generator_state, random_state, swapped_generator, swapped_random_state

_RANDOM = threading.RLock()
"""Held while the process's random streams are set back."""

_STRUCTURE = {key for key, value in nn.Module().__dict__.items() if isinstance(value, dict)}
"""Attributes of every module that a forward pass does not write: parameters, buffers, children, hooks."""

_SMALL = 2**16
"""Elements up to which a forward pass may write to a tensor that it keeps, such as the statistics of BatchNorm."""


def recomputing(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a part's forward, keeping its inputs only."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    call, num_runs = _Call(part, [leaf for leaf in leaves if isinstance(leaf, Tensor)]), 0

    def run() -> Any:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            return forward(*args, **kwargs)
        again_args, again_kwargs = tree_unflatten(leaves, spec)  # containers as they were given
        with call.again():
            return forward(*again_args, **again_kwargs)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)


class _Call:
    """What one call of a part has read, to repeat it."""

    def __init__(self, part: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._part = part
        # what forward may write to: attributes, such as the states of metrics, and buffers
        owners = [owner for module in part.modules() for owner in (vars(module), module._buffers)]
        self._held = [(own, {key: _copied(v) for key, v in own.items() if key not in _STRUCTURE}) for own in owners]
        kept = [("a tensor", v) for own, held in self._held for key, v in held.items() if own[key] is v]
        named = [(f"a parameter ({name})", parameter) for name, parameter in part.named_parameters()]
        tensors = [*(("an input", tensor) for tensor in inputs), *named, *kept]
        read = [(what, v) for what, v in tensors if isinstance(v, Tensor) and not v.is_inference()]
        self._read = [(what, tensor, tensor._version) for what, tensor in read]
        devices = {tensor.device for _, tensor in read if tensor.device.type not in ("cpu", "meta")}
        self._device_random = [(device, generator_state(device)) for device in devices]
        fake = any(isinstance(tensor, FakeTensor) for _, tensor in read)
        self._random = None if fake else random_state()  # a simulated run draws nothing
        self._dtype = torch.get_default_dtype()

    @contextmanager
    def again(self) -> Generator[None]:
        """The block of a further run, one for every backward pass through the part."""
        for what, tensor, version in self._read:
            if tensor._version != version:  # it would compute another gradient
                raise ConfigError(
                    f"recompute: {type(self._part).__name__} has {what} that was written to in or after its forward "
                    "pass, so that it can't be computed once more. Set strategy.recompute=never, or name the modules "
                    "to recompute without it (strategy.recompute=[...])."
                )
        with ExitStack() as stack:
            if self._random is not None:
                stack.enter_context(_RANDOM)
                stack.enter_context(swapped_random_state(self._random))
            for device, state in self._device_random:
                stack.enter_context(swapped_generator(device, state))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            for owner, held in self._held:
                stack.callback(refill, owner, dict(owner))
                owner.update({key: _copied(value) for key, value in held.items()})
            yield


def _copied(value: Any) -> Any:
    """A copy of what a forward pass may write to: a container, a small tensor that is not trained."""
    if isinstance(value, Tensor):
        return value if value.requires_grad or value.numel() > _SMALL else value.detach().clone()
    return value.copy() if type(value) in (list, dict, set, deque, OrderedDict) else value
