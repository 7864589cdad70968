"""Choose the parts of a module whose parameters are gathered together."""

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import ConfigError, verify_submodules

SMALLEST = 0.01
"""Fraction of a module's bytes below which a part is gathered with the root's own parameters."""


def automatic_parts(module: nn.Module, candidates: Sequence[str]) -> list[str]:
    """Choose among the parts that a module's forward calls one by one.

    A part stays with the root if it has no forward (`nn.ParameterList`), shares a parameter with another, is a
    BatchNorm layer, or is small.

    Args:
        candidates: names of disjoint submodules.
    """
    total = sum(parameter.nbytes for parameter in module.parameters())
    owned = [(name, list(module.get_submodule(name).parameters())) for name in candidates]
    num_owners = Counter(id(p) for _, parameters in owned for p in set(parameters))
    inside = {id(p) for _, parameters in owned for p in parameters}
    outside = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if not _is_in(name, candidates)}
    tied = {key for key in inside if num_owners[key] > 1 or key in outside}
    return [
        name
        for name, parameters in owned
        if parameters
        and type(module.get_submodule(name)).forward is not nn.Module.forward
        and not isinstance(module.get_submodule(name), _BatchNorm)
        and not any(id(p) in tied for p in parameters)
        and sum(p.nbytes for p in parameters) >= SMALLEST * total
    ]


def _is_in(name: str, prefixes: Sequence[str]) -> bool:
    return any(name.startswith(f"{prefix}.") for prefix in prefixes)


def named_parts(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Verify the parts that the user has named.

    Returns:
        The names, each before the parts that it is in.

    Raises:
        ConfigError: a name is unknown, or a part shares a parameter with what is outside of it.
    """
    verify_submodules("fsdp: shard", names, module)
    for name in names:
        own = {id(p) for p in module.get_submodule(name).parameters()}
        for other, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in own and not _is_in(other, [name]):
                raise ConfigError(
                    f"fsdp: shard={list(names)}: {name} shares the parameter {other} with the rest of the module, so "
                    "that it can't be gathered alone. Leave it out; it is gathered for the whole step then."
                )
    return sorted(names, key=lambda name: -name.count("."))
