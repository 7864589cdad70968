"""Measure the memory that each part of a module keeps for the backward pass, without computing anything.

The forward pass runs on fake tensors, which have shapes but no values, so it takes no memory and draws no random
numbers. Gradients are on, and every tensor that autograd saves is counted once, for the part that is running.

Source: `torch._subclasses.FakeTensorMode` and `torch.autograd.graph.saved_tensors_hooks` (PyTorch 2.13).
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

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
    bytes_of, running, fake = Counter[str](), [parts[0].name], FakeTensorMode()
    tensors = (*module.named_parameters(), *module.named_buffers())
    state: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in tensors}
    known = set(map(_storage, state.values()))

    def enter(name: str, *_: Any) -> None:
        running[0] = name

    def save(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            known.add(_storage(tensor))
            bytes_of[running[0]] += tensor.untyped_storage().nbytes()
        return tensor

    hooks = [
        module.get_submodule(part.name).register_forward_pre_hook(partial(enter, part.name))
        for part in parts
        if not part.loose
    ]
    inputs = tree_map_only(Tensor, fake.from_tensor, tuple(args))
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), fake, torch.enable_grad():
            functional_call(module, state, inputs, tie_weights=True)
    finally:
        for hook in hooks:
            hook.remove()
    return bytes_of


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
