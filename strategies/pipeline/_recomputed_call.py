"""Run a part of a module so that its activations are computed once more in the backward pass, instead of kept.

The second run must repeat the first one exactly, and leave no trace. So the first one remembers what it read (random
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
"""Attributes of every module that a forward pass does not write, parameters, children, hooks; and buffers."""

_SMALL = 2**16
"""Elements up to which what forward may write to is copied before each run; of larger ones those that it wrote to."""

Learned = list[set[str]]
"""The tensors, by the place of their owner and their name, that a part's forward writes to; empty before it has run."""


def recomputing(part: nn.Module, forward: Callable[..., Any], learned: Learned, *args: Any, **kwargs: Any) -> Any:
    """Run a part's forward, keeping its inputs only; `learned` is what earlier calls have found out."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    call = _Call(part, learned, [leaf for leaf in leaves if isinstance(leaf, Tensor)])

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

    def __init__(self, part: nn.Module, learned: Learned, inputs: Sequence[Tensor]) -> None:
        self.has_run = False
        self._name, self._learned = type(part).__name__, learned
        self._inputs = [("an input", tensor, tensor._version) for tensor in inputs if not tensor.is_inference()]
        self._weights = [(f"a parameter ({name})", w, w._version) for name, w in part.named_parameters()]
        self._flags = [(weight, weight.requires_grad) for weight in part.parameters()]
        self._dtype = torch.get_default_dtype()
        owners = [owner for module in part.modules() for owner in (vars(module), module._buffers)]
        self._held = [(own, {key: _copied(v) for key, v in own.items() if key not in _STRUCTURE}) for own in owners]
        # what forward may write to: buffers, and attributes such as the states of metrics
        held = [(f"{i}.{key}", v) for i, (_, values) in enumerate(self._held) for key, v in values.items()]
        self._tensors = [(key, v, v._version) for key, v in held if isinstance(v, Tensor) and not v.requires_grad]
        self._before = {
            id(tensor): tensor.detach().clone()
            for key, tensor, _ in self._tensors
            if not learned or tensor.numel() <= _SMALL or key in learned[0]
        }
        tensors = (*inputs, *part.parameters())
        devices = [device for device in {tensor.device for tensor in tensors} if device.type not in ("cpu", "meta")]
        self._device_random = [(device, generator_state(device)) for device in devices]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        self._random = None if fake else random_state()  # a simulated run draws nothing

    @contextmanager
    def first(self) -> Generator[None]:
        """The block of the first run: learn what it has read and written."""
        yield
        self.has_run = True
        if any(tensor._version != version for _, tensor, version in self._inputs):
            raise self._refused("writes to its input")
        if self._random is not None and _equal(self._random, random_state()):
            self._random = None  # the part draws nothing on the CPU
        written = {key: id(tensor) for key, tensor, version in self._tensors if tensor._version != version}
        if not self._before.keys() >= {*written.values()}:
            raise self._refused("writes to a buffer that it did not write to in its first forward pass")
        self._before = {i: t for i, t in self._before.items() if t.numel() <= _SMALL or i in written.values()}
        self._learned[:] = [{*written}.union(*self._learned)]

    @contextmanager
    def again(self) -> Generator[None]:
        """The block of a further run, one for every backward pass through the part: it reads what the first one read.

        What was frozen after the forward pass (`toggle_optimizer`) would lack tensors that the first run has saved.
        """
        for what, tensor, version in (*self._inputs, *self._weights):
            if tensor._version != version:  # it would compute another gradient
                raise self._refused(f"has {what} that was written to after its forward pass")
        before = {i: tensor.clone() for i, tensor in self._before.items()}  # to be written to
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
            for owner, held in self._held:
                stack.callback(refill, owner, dict(owner))
                owner.update({key: before.get(id(value), _copied(value)) for key, value in held.items()})
            yield

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"recompute: {self._name} {what}, so that it can't be computed once more. Set strategy.recompute=never, "
            "or name the modules to recompute without it (strategy.recompute=[...])."
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
