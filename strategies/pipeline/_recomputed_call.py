"""Run a part of a module so that its activations are computed once more in the backward pass, instead of kept.

The second run must repeat the first one exactly, and leave no trace. So the first one notes what it reads (random
states, attributes, buffers, the default dtype), and the second one runs with that, and puts back what it found.
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
from ..core.module_state import refill
from ..core.rng import generator_state, random_state, swapped_generator, swapped_random_state

_RANDOM = threading.RLock()
"""Held while the process's random streams are set back."""

_STRUCTURE = {key for key, value in nn.Module().__dict__.items() if isinstance(value, dict)}
"""Attributes of every module that a forward pass does not write: parameters, buffers, children, hooks."""

_SMALL = 2**16
"""Elements up to which a buffer counts as written to: BatchNorm writes its statistics without raising their version."""


def recomputing(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a part's forward, keeping its inputs only."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    call = _Call(part, [leaf for leaf in leaves if isinstance(leaf, Tensor)])

    def run() -> Any:
        if not call.has_run:
            with call.first():
                return forward(*args, **kwargs)
        again_args, again_kwargs = tree_unflatten(leaves, spec)  # containers as they were given
        with call.again():
            return forward(*again_args, **again_kwargs)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)


class _Call:
    """What one call of a part has read, to repeat it."""

    def __init__(self, part: nn.Module, inputs: Sequence[Tensor]) -> None:
        self.has_run = False
        self._part = part
        self._inputs = [("an input", tensor, tensor._version) for tensor in inputs if not tensor.is_inference()]
        self._weights = [(f"a parameter ({name})", w, w._version) for name, w in part.named_parameters()]
        self._flags = [(weight, weight.requires_grad) for weight in part.parameters()]
        self._dtype = torch.get_default_dtype()
        # what forward may write to: attributes, such as the states of metrics, and buffers
        owners = [owner for module in part.modules() for owner in (vars(module), module._buffers)]
        self._held = [(own, {key: _copied(v) for key, v in own.items() if key not in _STRUCTURE}) for own in owners]
        tensors = [v for _, held in self._held for v in held.values() if isinstance(v, Tensor) and not v.requires_grad]
        self._contents = [(t, t._version, t.detach().clone()) for t in tensors if not t.is_inference()]
        tensors = (*inputs, *part.parameters())
        devices = [device for device in {tensor.device for tensor in tensors} if device.type not in ("cpu", "meta")]
        self._device_random = [(device, generator_state(device)) for device in devices]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        self._random = None if fake else random_state()  # a simulated run draws nothing

    @contextmanager
    def first(self) -> Generator[None]:
        """The block of the first run: forget what it has not used."""
        yield
        self.has_run = True
        if any(tensor._version != version for _, tensor, version in self._inputs):
            raise self._refused("writes to its input")
        if self._random is not None and _equal(self._random, random_state()):
            self._random = None  # the part draws nothing on the CPU
        self._contents = [each for each in self._contents if each[0].numel() <= _SMALL or each[0]._version != each[1]]

    @contextmanager
    def again(self) -> Generator[None]:
        """The block of a further run, one for every backward pass through the part: it reads what the first one read.

        What was frozen after the forward pass (`toggle_optimizer`) would lack tensors that the first run has saved.
        """
        for what, tensor, version in (*self._inputs, *self._weights):
            if tensor._version != version:  # it would compute another gradient
                raise self._refused(f"has {what} that was written to after its forward pass")
        with ExitStack() as stack:
            if self._random is not None:
                stack.enter_context(_RANDOM)
                stack.enter_context(swapped_random_state(self._random))
            for device, state in self._device_random:
                stack.enter_context(swapped_generator(device, state))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            for weight, flag in self._flags:
                if weight.requires_grad != flag:
                    stack.callback(weight.requires_grad_, not flag)
                    weight.requires_grad_(flag)
            before = {id(tensor): contents.clone() for tensor, _, contents in self._contents}  # to be written to
            for owner, held in self._held:
                stack.callback(refill, owner, dict(owner))
                owner.update({key: before.get(id(value), _copied(value)) for key, value in held.items()})
            yield

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"recompute: {type(self._part).__name__} {what}, so that it can't be computed once more. Set "
            "strategy.recompute=never, or name the modules to recompute without it (strategy.recompute=[...])."
        )


def _copied(value: Any) -> Any:
    """A copy of a container, to which a forward pass may append."""
    return value.copy() if type(value) in (list, dict, set, deque, OrderedDict) else value


def _equal(one: Any, other: Any) -> bool:
    """Whether two random states of the process are the same."""
    (torch_one, numpy_one, python_one), (torch_other, numpy_other, python_other) = one, other
    numpy_same = numpy_one[2:] == numpy_other[2:] and bool((numpy_one[1] == numpy_other[1]).all())
    torch_same = bool((torch_one.numpy() == torch_other.numpy()).all())  # no operation that a dispatch mode sees
    return torch_same and numpy_same and python_one == python_other
