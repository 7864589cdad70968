"""Find the parts of a module that can be placed on separate devices.

A *part* is a submodule that is placed whole, or the parameters that an opened module holds itself. Modules are opened
(their children are placed one by one) if they do nothing but call their children: the root, `nn.Sequential`,
`nn.ModuleList`, `nn.ModuleDict`, an only child of an opened module, and ancestors of modules that the user names.
Modules without parameters and buffers are not parts: they run where their inputs are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..core.module_checks import verify_shapes, verify_unscripted


@dataclass(frozen=True)
class Part:
    """The unit of placement: a submodule, or the tensors that an opened module holds itself."""

    name: str
    tensors: tuple[Tensor, ...]
    """Parameters and buffers, each listed once."""
    loose: bool
    """Whether these are tensors that an opened module holds itself; they go with the next part."""
    begins: bool = False
    """Whether it stands before the layers of a module of the user's; it goes with the next part, too."""


def find_parts(module: nn.Module, names: Sequence[str] = ()) -> list[Part]:
    """List the parts of a module, in order of registration.

    Args:
        names: submodules that must be parts, or consist of whole parts: their ancestors are opened.

    Returns:
        Parts that together hold every parameter and buffer of the module.

    Raises:
        ConfigError: a parameter is uninitialized (`nn.LazyLinear` and the like), or a layer is of TorchScript.
    """
    verify_shapes(module)
    verify_unscripted(module)
    ancestors = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return list(_walk(module, "", ancestors))


def first_layers(module: nn.Module) -> list[str]:
    """Names of the first layer in each `nn.ModuleList` that is in no other.

    Where there are too few parts (layers within modules of transformers, all tied by their embedding), modules are
    opened down to them.
    """
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{name}.0" for name in outer if _tensors(module.get_submodule(name))]


def _walk(module: nn.Module, name: str, opened: set[str], begins: bool = False) -> Iterator[Part]:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if own:
        yield Part(name, own, loose=True)
    holders = {key: child for key, child in module.named_children() if _tensors(child)}
    for key, child in holders.items():
        path = f"{name}.{key}" if name else key
        begins = begins and not isinstance(child, nn.ModuleList)
        opens = _opens(child, alone=len(holders) == 1)
        if path in opened or opens:
            has_layers = any(isinstance(part, nn.ModuleList) for part in child.children())
            yield from _walk(child, path, opened, begins=has_layers and not opens)
        else:
            yield Part(path, _tensors(child), loose=False, begins=begins)


def _tensors(module: nn.Module) -> tuple[Tensor, ...]:
    return (*module.parameters(), *module.buffers())


def _opens(module: nn.Module, *, alone: bool) -> bool:
    holders = [child for child in module.children() if _tensors(child)]
    if not holders:
        return False
    # a subclass with its own forward may do anything between its children, such as add a residual
    if type(module).forward in (nn.Sequential.forward, nn.Module.forward):
        return True
    foreign = type(module).__module__.split(".")[0] != "torch"
    return alone and (foreign or any(isinstance(child, (nn.Sequential, nn.ModuleList)) for child in holders))


def part_bytes(part: Part, optimizer_copies: float) -> int:
    """Count the bytes that a part occupies in training.

    Args:
        optimizer_copies: tensors of a parameter's size that the optimizer keeps per trainable parameter.

    Returns:
        Bytes of weights and buffers, plus gradients and optimizer copies of the trainable weights.
    """
    return sum(round(t.nbytes * (2 + optimizer_copies if t.requires_grad else 1)) for t in part.tensors)


def place_parts(module: nn.Module, device_of: Mapping[str, torch.device], elsewhere: torch.device) -> None:
    """Move each part to its device; the module is never on one device as a whole.

    Args:
        device_of: device by part name, for all parts.
        elsewhere: device of modules without parameters, such as metrics (they may hold other tensors).
    """
    inside: tuple[str, ...] = ()
    for part in find_parts(module, list(device_of)):
        owner = module.get_submodule(part.name)
        if part.loose:
            owner._apply(partial(Tensor.to, device=device_of[part.name]), recurse=False)
        else:
            owner.to(device_of[part.name])
            inside += (f"{part.name}.",)
    for name, child in module.named_modules():
        if not _tensors(child) and not f"{name}.".startswith(inside):
            child.to(elsewhere)
