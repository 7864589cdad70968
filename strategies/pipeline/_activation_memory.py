"""Measure the memory that each part of a module keeps for backward, without computing anything.

The forward pass runs on fake tensors, which have shapes but no values, so it takes no memory and draws no random
numbers. Gradients are on, and every tensor that autograd saves is counted once, for the part that is running.

Source: `torch._subclasses.FakeTensorMode` and `torch.autograd.graph.saved_tensors_hooks` (PyTorch 2.13).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..core.private import of_torch
from .module_parts import Part


def profile_activations(module: nn.Module, parts: Sequence[Part], args: Sequence[Any]) -> dict[str, int]:
    """Count the bytes saved for backward, by part.

    Args:
        module: the module, not yet placed.
        parts: its parts; operations between two parts count for the first.
        args: inputs of `forward`, as large as one device's batch.

    Returns:
        Bytes by part name, without parameters and buffers.
    """
    fake = of_torch.FakeTensorMode()
    tensors = (*module.named_parameters(), *module.named_buffers())
    state: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in tensors}
    inputs = of_torch.tree_map_only(Tensor, fake.from_tensor, tuple(args))
    meter = _Meter(parts[0].name, {_storage(tensor) for tensor in state.values()})
    hooks = [
        module.get_submodule(part.name).register_forward_pre_hook(partial(meter.enter, part.name))
        for part in parts
        if not part.loose
    ]
    try:
        with fake, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(meter.save, lambda tensor: tensor):
            functional_call(module, state, inputs, tie_weights=True)
    finally:
        for hook in hooks:
            hook.remove()
    return meter.bytes_of


class _Meter:
    def __init__(self, first: str, known: set[int]) -> None:
        self.bytes_of: dict[str, int] = {}
        self._part = first
        self._counted = known

    def enter(self, part: str, *_: Any) -> None:
        self._part = part

    def save(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._counted:
            self._counted.add(storage)
            size = tensor.untyped_storage().nbytes()
            self.bytes_of[self._part] = self.bytes_of.get(self._part, 0) + size
        return tensor


def _storage(tensor: Tensor) -> int:
    return of_torch.cdata(tensor.untyped_storage())
