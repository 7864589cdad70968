"""Keep replicas of a module: made once per device, refreshed only when the root's tensors change.

The first replica is the root module itself. A refresh copies:

    changed on the root                  detected by                              action
    parameters                           tensor versions; `mark_changed`          one coalesced copy per device
    buffers                              versions, the copy's own too; identity   one coalesced copy per device
    attributes, `training`, hooks        values of the modules' `__dict__`        set on the copies
    modules or parameters added          identity                                 the copies are rebuilt
"""

import itertools
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from ..core.devices import copy_coalesced
from ._module_copy import ModuleCopy


def attribute_values(module: nn.Module) -> tuple[Any, ...]:
    """The values of a module's attributes, in the order in which they were first set."""
    return tuple(module.__dict__.values())


def are_same(values: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects, or equal ones of simple types."""
    try:
        return values == others  # Python compares identity first
    except (RuntimeError, ValueError):
        return False  # tensors and arrays have no single truth value


class Replicas:
    """One replica of a module per device.

    Args:
        root: the module, on `devices[0]`.
        devices: one per replica; they may repeat and mix.

    Attributes:
        num_copied_parameters: parameters copied since the replicas were made, each counted once per device.
    """

    def __init__(self, root: nn.Module, devices: Sequence[torch.device]) -> None:
        self.root = root
        self.devices = list(devices)
        self.num_copied_parameters = 0
        self._make()

    def __getitem__(self, i: int) -> Any:
        return self.root if i == 0 else self._copies[i - 1].module

    def __len__(self) -> int:
        return len(self.devices)

    def parameters(self) -> list[list[Tensor]]:
        """The parameters of every replica, each list in the order of the root's; tied parameters appear once."""
        return [self._parameters, *self._parameter_copies]

    def modules(self) -> list[list[nn.Module]]:
        """The modules of every replica, in the same order, without torchmetrics' metrics and their submodules."""
        return [self._modules, *([replica for _, replica in copy.pairs] for copy in self._copies)]

    def counterpart(self, i: int, value: Any) -> Any:
        """The counterpart in replica i of a module of the root; for i = 0 the module itself."""
        return value if i == 0 else self._copies[i - 1].counterpart(value)

    def mark_changed(self, frozen: bool = True) -> None:
        """Make the next refresh copy all parameters: writes to `parameter.data` do not change a tensor's version.

        Args:
            frozen: include parameters that don't require a gradient.
        """
        self._changed |= {i for i, parameter in enumerate(self._parameters) if frozen or parameter.requires_grad}

    def refresh(self) -> bool:
        """Copy what changed on the root since the last refresh.

        Returns:
            Whether the copies were rebuilt because modules or parameters were added or replaced.
        """
        if self._has_new_structure():
            self._make()
            return True
        with torch.inference_mode(False), torch.no_grad():
            self._refresh_parameters()
            self._refresh_buffers()
        self._refresh_attributes()
        return False

    def adopt_buffers(self, i: int) -> None:
        """Copy replica i's buffers to the root: it ran the first chunk because the root had no samples."""
        if i > 0:
            with torch.inference_mode(False), torch.no_grad():
                copy_coalesced(self._buffers(i), self._buffers(0))

    def _make(self) -> None:
        self._copies = [ModuleCopy(self.root, self.devices[0], device) for device in self.devices[1:]]
        self._modules = _plain_modules(self.root)
        self._changed: set[int] = set()
        self._slots = list(_parameter_slots(self._modules))
        self._parameters: list[Any] = [module._parameters[name] for module, name in self._slots]
        self._parameter_copies = [[copy.counterpart(p) for p in self._parameters] for copy in self._copies]
        self._versions = [_version(parameter) for parameter in self._parameters]
        self._children = [tuple(module._modules.values()) for module in self._modules]
        self._buffer_slots = [
            (module, name) for module in self._modules for name, buffer in module._buffers.items() if buffer is not None
        ]
        self._buffer_versions = self._versions_of_buffers()
        self._attributes = [attribute_values(module) for module in self._modules]

    def _has_new_structure(self) -> bool:
        parameters = [module._parameters.get(name) for module, name in self._slots]
        children = [tuple(module._modules.values()) for module in self._modules]
        return children != self._children or not all(map(is_, parameters, self._parameters))

    def _refresh_parameters(self) -> None:
        versions = [_version(parameter) for parameter in self._parameters]
        changed = [i for i, version in enumerate(versions) if version != self._versions[i] or i in self._changed]
        sources = [self._parameters[i] for i in changed]
        for copies in self._parameter_copies:
            copy_coalesced(sources, [copies[i] for i in changed])
            for parameter, replica in zip(self._parameters, copies, strict=True):
                if parameter.requires_grad != replica.requires_grad:
                    replica.requires_grad_(parameter.requires_grad)
        self.num_copied_parameters += len(sources) * len(self._copies)
        self._versions = versions
        self._changed = set()

    def _buffers(self, i: int) -> list[Tensor]:
        """The buffers of replica i."""
        modules = [(self.counterpart(i, module), name) for module, name in self._buffer_slots]
        return [module._buffers[name] for module, name in modules]

    def _versions_of_buffers(self) -> list[Any]:
        return [[(id(buffer), _version(buffer)) for buffer in self._buffers(i)] for i in range(len(self))]

    def _refresh_buffers(self) -> None:
        if not self._buffer_slots or self._versions_of_buffers() == self._buffer_versions:
            return
        for i in range(1, len(self)):
            self._set_buffers(i, self._buffers(0))
        self._buffer_versions = self._versions_of_buffers()

    def _set_buffers(self, i: int, buffers: list[Tensor]) -> None:
        """Give replica i copies of buffers; new tensors, because a graph may still need the old values."""
        copies = [torch.empty_like(buffer, device=self.devices[i]) for buffer in buffers]
        copy_coalesced(buffers, copies)
        for (module, name), copy in zip(self._buffer_slots, copies, strict=True):
            self.counterpart(i, module)._buffers[name] = copy

    def _refresh_attributes(self) -> None:
        for i, module in enumerate(self._modules):
            values = attribute_values(module)
            if not are_same(values, self._attributes[i]):
                self._set_attributes(module)
                self._attributes[i] = values

    def _set_attributes(self, module: nn.Module) -> None:
        for copy in self._copies:
            replica = copy.counterpart(module)
            for key, value in module.__dict__.items():
                copy.set_attribute(replica, key, value)


def _version(tensor: Tensor) -> int:
    """A number that grows with every write to a tensor; always new for inference tensors, which have no version."""
    return next(_UNVERSIONED) if tensor.is_inference() else tensor._version


_UNVERSIONED = itertools.count(-1, -1)


def _plain_modules(root: nn.Module) -> list[nn.Module]:
    """The modules that are copied one by one, root first, each once."""
    found: dict[int, nn.Module] = {}
    _find_plain_modules(root, found)
    return list(found.values())


def _find_plain_modules(module: nn.Module, found: dict[int, nn.Module]) -> None:
    if id(module) in found or isinstance(module, (Metric, MetricCollection)):
        return
    found[id(module)] = module
    for child in module._modules.values():
        if child is not None:
            _find_plain_modules(child, found)


def _parameter_slots(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, name) of every parameter; for a tied parameter, the first."""
    seen: set[int] = set()
    for module in modules:
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, name
