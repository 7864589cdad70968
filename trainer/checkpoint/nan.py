"""Tell whether weights are damaged by nan, which no later step repairs."""

from typing import Any

import torch
from torch.nn.parameter import is_lazy


def has_nan(module: torch.nn.Module) -> bool:
    """Whether parameters of this process contain nan; reads each once, and waits for its devices.

    Args:
        module: its parameters may lie on several devices, or be this rank's shards.
    """
    found: dict[torch.device, torch.Tensor] = {}
    for parameter in module.parameters():
        if is_lazy(parameter) or not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        whole: Any = parameter.detach()
        local: torch.Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
        # a sum reads the values once, and with a nan among them it is nan
        local = local.float() if local.element_size() == 1 else local  # torch can't sum float8
        nan = local.sum(dtype=torch.float32 if local.element_size() < 4 else None).isnan()
        found[nan.device] = found[nan.device] | nan if nan.device in found else nan
    return any(bool(nan) for nan in found.values())
