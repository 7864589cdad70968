"""Modules of `torch.compile` among replicas: what they are, and how often torch compiles one."""

from torch import nn

from ..core.private import of_torch

_LIMIT = 8
"""Torch's own limit of compilations per function (torch 2.13), after which it runs without compiling."""


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule"  # importing the class would take a second


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by `torch.compile(module)` or `module.compile()`."""
    return is_wrapper(module) or of_torch.compiled_call_impl(module) is not None


def allow_recompiling(num_devices: int) -> None:
    """Raise torch's limit of compilations, since a function is compiled for each device."""
    known = of_torch.dynamo_config()
    known.recompile_limit = max(known.recompile_limit, _LIMIT * num_devices)
