"""Keep replicas of a module: made once per device, refreshed only when the root's tensors change.

changed on the root                  detected by                              action
parameters, buffers                  versions; identity; `mark_changed`       one coalesced copy per device
attributes, `training`               values of the modules' `__dict__`        set on the copies
modules, parameters, or their hooks  identity, numbers of hooks               the copies are rebuilt
"""

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from ..core.module_checks import is_compiler, recompute_weights
from ..core.patching import HOOKS, Replacement
from ._parameter_copies import copied, follow, write


class Replicas:
    """One replica of a module per device, the first of which is the module itself."""

    def __init__(self, root: nn.Module, devices: Sequence[torch.device], one_by_one: bool = False) -> None:
        self.root, self.devices, self._one_by_one = root, list(devices), one_by_one
        self._make()

    def __getitem__(self, i: int) -> Any:
        return self.root if i == 0 else self._copies[i - 1].module

    def modules(self) -> list[list[nn.Module]]:
        """The modules of every replica, in the same order, without torchmetrics' metrics and their submodules."""
        return [self._modules, *([copy.counterpart(module) for module in self._modules] for copy in self._copies)]

    def mark_changed(self) -> None:
        """Make the next refresh copy parameters and buffers, whatever is known of writes to them."""
        self._versions = []  # a write through `.data` raises no version

    def refresh(self) -> bool:
        """Copy what changed on the root since the last refresh; returns whether the copies had to be rebuilt."""
        if self._structure != self._read_structure():
            self._make()
            return True
        if self._versions != (now := self._read_versions()):
            write(self._parameters, self._parameter_copies)
            if self._slots:
                self._refresh_buffers()
            self._versions = now  # else a second call in a step would write to what its graph has saved
        flags, frozen = self._read_flags(), [not parameter.requires_grad for parameter in self._parameters]
        if flags != self._flags or any([copy.is_leaf for copy in own] != frozen for own in self._parameter_copies):
            self._follow()
        for i, (module, known) in enumerate(zip(self._modules, self._known, strict=True)):
            now = module.__dict__
            if len(now) != len(known) or not all(map(is_, now.values(), known.values())) or [*now] != [*known]:
                changed = [key for key in known.keys() | now.keys() if now.get(key) is not known.get(key)]
                for copy in self._copies:
                    copy.update(module, changed)
                self._known[i] = now.copy()
        return False

    def after_step(self, used: Sequence[int]) -> None:
        """Have the root, if it had no samples, take over what it has missed; evaluation changes no buffers."""
        if used[0] == 0:
            return
        if self.root.training:
            write(self._buffers(used[0]), [self._buffers(0)])
        recompute_weights(self.root)

    def _make(self) -> None:
        self._copies = [ModuleCopy(self.root, self.devices[0], device) for device in self.devices[1:]]
        self._modules = plain_modules(self.root)
        self._hooks = [module.__dict__[key] for module in self._modules for key in HOOKS]
        self._registries = [one for module in self._modules for one in (module._modules, module._parameters)]
        self._structure = self._read_structure()
        found = {id(one): one for module in self._modules for one in module._parameters.values() if one is not None}
        self._parameters: list[Any] = list(found.values())
        self._parameter_copies = [[copy.counterpart(p) for p in self._parameters] for copy in self._copies]
        self._follow()
        buffers = [(module, name, one) for module in self._modules for name, one in module._buffers.items()]
        self._slots = [(module, name) for module, name, one in buffers if one is not None]
        self._versions = self._read_versions()
        self._known = [module.__dict__.copy() for module in self._modules]

    def _read_structure(self) -> Any:
        """The numbers of hooks, and the modules and parameters, all of which are kept alive."""
        return [*map(tuple, self._hooks)], [id(one) for registry in self._registries for one in registry.values()]

    def _read_versions(self) -> list[Any]:
        """Numbers that grow with every write to a tensor; always new for inference tensors, which have no version."""
        buffers = self._buffers(0)
        versions = [float("nan") if one.is_inference() else one._version for one in (*self._parameters, *buffers)]
        return [*versions, *map(id, buffers)]

    def _read_flags(self) -> list[tuple[bool, bool]]:
        """Of each parameter, whether it is trained, and whether its gradient has hooks."""
        return [(parameter.requires_grad, bool(parameter._backward_hooks)) for parameter in self._parameters]

    def _follow(self) -> None:
        self._flags = self._read_flags()
        follow(self._parameters, self._parameter_copies, self._one_by_one)

    def _buffers(self, i: int) -> list[Tensor]:
        """The buffers of replica i."""
        modules = [(self._copies[i - 1].counterpart(module) if i else module, name) for module, name in self._slots]
        return [module._buffers[name] for module, name in modules]

    def _refresh_buffers(self) -> None:
        buffers = self._buffers(0)
        with torch.inference_mode(False):  # new tensors, because a graph may still need the old values
            copies = [[torch.empty_like(one, device=copy.device) for one in buffers] for copy in self._copies]
        write(buffers, copies)
        for copy, own in zip(self._copies, copies, strict=True):
            for (module, name), buffer in zip(self._slots, own, strict=True):
                copy.counterpart(module)._buffers[name] = buffer


class ModuleCopy:
    """A copy of a module, `module`, on a device; metrics of torchmetrics in it are the root's."""

    def __init__(self, root: nn.Module, root_device: torch.device, device: torch.device) -> None:
        self.device, self._root_device = device, root_device
        self._copies: dict[int, tuple[Any, Any]] = {}  # keeps the originals alive, so that no id is reused
        self._open: set[int] = set()
        with torch.inference_mode(False), torch.no_grad():
            self.module = self._copy_module(root)

    def counterpart(self, value: Any) -> Any:
        """The copy of a module, parameter or buffer of the root; None for anything else."""
        return self._copies.get(id(value), (None, None))[1]

    def update(self, original: nn.Module, keys: Iterable[str]) -> None:
        """Bring over attributes of a module of the root, with references to it replaced."""
        attributes = self.counterpart(original).__dict__
        for key in keys:
            value = original.__dict__.get(key)
            if key not in original.__dict__:
                attributes.pop(key, None)
            elif key == "_device" and isinstance(value, torch.device):
                attributes[key] = self.device
            elif key not in (*HOOKS, "_parameters", "_buffers", "_modules") and not isinstance(value, Replacement):
                attributes[key] = self._translated(value)

    def _copy_module(self, root: nn.Module) -> nn.Module:
        """Copy a module and those in it: first all of them, to which their attributes may then refer."""
        found = [module for module in plain_modules(root) if id(module) not in self._copies]
        originals = [module for module in found if not is_compiler(module)]
        for original in originals:
            replica = original.__new__(type(original))
            replica.__dict__ = {key: one for key, one in vars(original).items() if not isinstance(one, Replacement)}
            self._copies[id(original)] = original, replica
        for compiled in [module for module in found if is_compiler(module)]:
            made = type(compiled)(self.counterpart(compiled._orig_mod), compiled.dynamo_ctx)
            self._copies[id(compiled)] = compiled, made
        for original in originals:
            replica = self.counterpart(original)
            for registry in ("_parameters", "_buffers"):
                tensors = vars(original)[registry].items()
                vars(replica)[registry] = {key: None if one is None else self._copy(one) for key, one in tensors}
            children = original._modules.items()
            replica._modules = {key: self._copies.get(id(child), (child, child))[1] for key, child in children}
        for original in originals:
            self.update(original, original.__dict__)
            for key in HOOKS:  # with the same numbers
                hooks = original.__dict__[key].items()
                vars(self.counterpart(original))[key] = OrderedDict((i, self._translated(hook)) for i, hook in hooks)
        return self.counterpart(root)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a parameter or buffer; the same one always gets the same copy."""
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, copied(tensor, self.device)
        return self._copies[id(tensor)][1]

    def _translated(self, value: Any) -> Any:
        """A value with references to the copy instead of the root; the same object where there are none."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, nn.Module):  # a wrapper may have taken over the root's layers and forward
            tensors = [*value.parameters(), *value.buffers()]
            is_of_root = tensors and all(id(tensor) in self._copies for tensor in tensors)
            return self._copy_module(value) if is_of_root else value
        if isinstance(value, Tensor):
            stays = value.device != self._root_device or value.device == self.device
            return value if stays else value.detach().to(self.device)
        take_apart = _PARTS.get(type(value))
        if take_apart is None or id(value) in self._open:
            return value
        parts, rebuild = take_apart(value)
        self._open.add(id(value))
        translated = [*map(self._translated, parts)]
        self._open.discard(id(value))
        return value if all(map(is_, translated, parts)) else rebuild(translated)


def plain_modules(root: nn.Module) -> list[Any]:
    """The modules that are copied one by one, root first, each once."""
    found: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = [root]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found and not isinstance(module, (Metric, MetricCollection)):
            found[id(module)] = module
            left += reversed(module._modules.values())
    return list(found.values())


Parts = tuple[list[Any], Callable[[list[Any]], Any]]
"""What an object refers to, and what makes such an object of others."""


def _of_mapping(value: Any) -> Parts:
    return [*value.values()], lambda parts: type(value)(zip(value, parts, strict=True))


def _of_function(value: types.FunctionType) -> Parts:
    """A closure over the module, such as a wrapper around one of its methods."""

    def rebuilt(parts: list[Any]) -> Any:
        function = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, (*parts,))
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function

    return [*(value.__closure__ or ())], rebuilt


def _of_cell(cell: types.CellType) -> Parts:
    try:
        return [cell.cell_contents], lambda parts: types.CellType(parts[0])
    except ValueError:
        return [], lambda _: cell  # an empty one


_PARTS: dict[type, Callable[[Any], Parts]] = {
    list: lambda value: (value, list),
    tuple: lambda value: ([*value], tuple),
    dict: _of_mapping,
    OrderedDict: _of_mapping,
    types.MethodType: lambda value: ([value.__self__], lambda parts: types.MethodType(value.__func__, parts[0])),
    types.FunctionType: _of_function,
    types.CellType: _of_cell,
    functools.partial: lambda value: (
        [value.func, value.args, value.keywords], lambda parts: functools.partial(parts[0], *parts[1], **parts[2])
    ),
    weakref.ref: lambda value: ([value()], lambda parts: weakref.ref(parts[0])),
}  # fmt: skip
