"""Measure the memory that each part of a module keeps for backward, or its operations, without computing anything.

The forward pass runs on fake tensors, which have shapes but no values, so it takes no memory and draws no random
numbers. Gradients are on, and every tensor that autograd saves is counted once, for the part that is running.

Source: `torch._subclasses.FakeTensorMode`, `torch.autograd.graph.saved_tensors_hooks` and
`torch.utils.flop_counter.FlopCounterMode` (PyTorch 2.13).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

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
    bytes_of, known, part = Counter[str](), set[int](), [parts[0].name]

    def enter(name: str, *_: Any) -> None:
        part[0] = name

    def save(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            known.add(_storage(tensor))
            bytes_of[part[0]] += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        _run_on_fakes(module, parts, args, enter, known)
    return bytes_of


def profile_flops(module: nn.Module, parts: Sequence[Part], args: Sequence[Any]) -> dict[str, int]:
    """Count the floating-point operations of a forward pass, by part; arguments as above."""
    counter, part = FlopCounterMode(display=False), [parts[0].name]
    totals = dict.fromkeys((p.name for p in parts), 0)

    def enter(name: str, *_: Any) -> None:
        totals[part[0]] += counter.get_total_flops() - sum(totals.values())
        part[0] = name

    with counter:
        _run_on_fakes(module, parts, args, enter)
    enter("")
    return totals


def _run_on_fakes(
    module: nn.Module,
    parts: Sequence[Part],
    args: Sequence[Any],
    enter: Callable[..., None],
    known: set[int] | None = None,
) -> None:
    """Run forward without computing, telling which part runs; `known` gets the memory of parameters and buffers."""
    fake = FakeTensorMode()
    tensors = (*module.named_parameters(), *module.named_buffers())
    state: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in tensors}
    inputs = tree_map_only(Tensor, fake.from_tensor, tuple(args))
    if known is not None:
        known.update(map(_storage, state.values()))
    hooks = [
        module.get_submodule(part.name).register_forward_pre_hook(partial(enter, part.name))
        for part in parts
        if not part.loose
    ]
    try:
        with fake, torch.enable_grad():
            functional_call(module, state, inputs, tie_weights=True)
    finally:
        for hook in hooks:
            hook.remove()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
