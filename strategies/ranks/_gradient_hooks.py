"""Refuse hooks on parameters that make something else of a rank's gradient than a part of the global batch's.

A mask or a factor of each rank's gradient is one of their mean. What clamps, normalises or takes absolute values is
not: of a gradient a thousand times as large, and of the other sign, it does not make a thousand times as much.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.private import of_torch

_FACTOR = -1024.0
"""A power of 2, by which nothing is rounded."""
_ROUNDING = 1e-3
_INSTEAD = "on_after_backward or on_before_optimizer_step, which see the gradient of the global batch"


def verify_hooks(module: nn.Module, strategy: str) -> None:
    """Look at what each hook on a parameter makes of the first gradient that it gets.

    Args:
        strategy: name that begins messages.
    """
    told = list[str]()
    for name, parameter in module.named_parameters():
        hooks: dict[int, Callable[[Tensor], Any]] = of_torch.backward_hooks(parameter) or {}
        for key, hook in list(hooks.items()):
            hooks[key] = partial(_verified, hooks, key, hook, f"{strategy}: a hook on the parameter {name}", told)


def _verified(
    hooks: dict[int, Any], key: int, hook: Callable[[Tensor], Any], name: str, told: list[str], gradient: Tensor
) -> Any:
    """Call a hook, and for the first time see what it makes of another gradient.

    Raises:
        ConfigError: it is not that of a part of the batch.
    """
    if key in hooks:
        hooks[key] = hook
    if gradient.layout is not torch.strided:
        return hook(gradient)
    before, other = gradient.detach().clone(), gradient.detach() * _FACTOR
    changed = hook(gradient)
    made = gradient if changed is None else changed
    if (changed is None or changed is gradient) and torch.equal(made, before):
        if not told:
            rank_zero_warn(
                f"{name} leaves its gradient as it is, which is that of the rank's samples alone. If the hook reads or "
                f"collects it, do so in {_INSTEAD}."
            )
        told.append(name)
        return changed
    made_of_other = hook(other)
    expected = made.detach() * _FACTOR
    difference, largest = (other if made_of_other is None else made_of_other) - expected, expected.abs().max()
    if torch.isfinite(largest) and difference.abs().max() > _ROUNDING * largest:
        raise ConfigError(
            f"{name} makes something else of a sum of gradients than of each of them, and gets a rank's alone. "
            f"Change it in {_INSTEAD}; or set strategy.verify_loss=false (fsdp has no such option), which trains "
            "otherwise than one device."
        )
    return changed
