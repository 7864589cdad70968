"""Time the parts of a module, forward and backward, while micro-batches run one after the other."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.devices import seconds_between, time_mark

_Time = float | torch.Event


class PartTimes:
    """Measures how long each part of a module works for a micro-batch.

    A part's backward pass lasts from the gradients of its outputs to those of its inputs. Where inputs have none, it
    ends when the next part begins.

    Args:
        module: the placed module.
        device_of: device by name of the parts that are modules.
    """

    def __init__(self, module: nn.Module, device_of: Mapping[str, torch.device]) -> None:
        self._device_of = device_of
        self._depth: dict[str, int] = {}
        self._starts: dict[str, _Time] = {}
        self._without_end: set[str] = set()
        self._spans: list[tuple[str, _Time, _Time]] = []
        self._microbatches: list[list[tuple[str, _Time, _Time]]] = []
        self._hooks: list[Any] = []
        for name in device_of:
            part = module.get_submodule(name)
            self._hooks.append(part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            self._hooks.append(part.register_forward_hook(partial(self._leave, name), prepend=True))

    def begin_microbatch(self) -> None:
        """Drop what was measured since the last micro-batch, such as validation."""
        self._spans = []
        self._depth, self._starts, self._without_end = {}, {}, set()

    def end_microbatch(self) -> None:
        """End the backward passes that have no end, and keep what was measured."""
        for name in list(self._starts):
            self._close(name)
        self._microbatches.append(self._spans)

    def seconds(self) -> dict[str, float]:
        """Seconds per micro-batch by part: the least measured, since all else that runs only adds to it."""
        totals: dict[str, list[float]] = {name: [] for name in self._device_of}
        for spans in self._microbatches:
            sums = dict.fromkeys(totals, 0.0)
            for name, start, end in spans:
                sums[name] += seconds_between(start, end)
            for name, seconds in sums.items():
                totals[name].append(seconds)
        return {name: min(found, default=0.0) for name, found in totals.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        marked, has_grad = _marked((args, kwargs), partial(self._end, name))
        if not has_grad:
            self._without_end.add(name)
        self._begin(name)
        return marked

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        self._end(name)
        return _marked(output, partial(self._begin_backward, name))[0]

    def _begin_backward(self, name: str) -> None:
        for other in self._without_end & self._starts.keys():
            self._close(other)
        self._begin(name)

    def _begin(self, name: str) -> None:
        self._depth[name] = self._depth.get(name, 0) + 1
        self._starts.setdefault(name, time_mark(self._device_of[name]))

    def _end(self, name: str) -> None:
        self._depth[name] = self._depth.get(name, 0) - 1
        if self._depth[name] <= 0 and name in self._starts:
            self._close(name)

    def _close(self, name: str) -> None:
        self._depth[name] = 0
        self._spans.append((name, self._starts.pop(name), time_mark(self._device_of[name])))


def _marked(value: Any, call: Callable[[], None]) -> tuple[Any, bool]:
    """Have a function called when the gradients of all tensors in a value have arrived; and whether there are any."""
    leaves, spec = tree_flatten(value)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    for i, tensor in zip(places, on_backward([leaves[i] for i in places], call), strict=True):
        leaves[i] = tensor
    return tree_unflatten(leaves, spec), bool(places)


def on_backward(tensors: list[Tensor], call: Callable[[], None]) -> list[Tensor]:
    """Have a function called once in backward, when the gradients of all these tensors have arrived."""
    with_grad = [tensor.requires_grad for tensor in tensors]
    if not any(with_grad) or not torch.is_grad_enabled():
        return tensors
    marked = iter(_Mark.apply(call, *(t for t, grad in zip(tensors, with_grad, strict=True) if grad)))
    return [next(marked) if grad else tensor for tensor, grad in zip(tensors, with_grad, strict=True)]


class _Mark(torch.autograd.Function):
    """Identity that calls a function once in backward, when all gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        # detached, not views, so that a module may modify its input in place
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return (None, *grads)
