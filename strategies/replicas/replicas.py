"""Keep replicas of a module: made once per device, refreshed only when the root's tensors change.

The first replica is the root module itself. A refresh copies:

    changed on the root                  detected by                              action
    parameters, buffers                  versions; identity; `mark_changed`       one coalesced copy per device
    attributes, `training`               values of the modules' `__dict__`        set on the copies
    modules, parameters, or their hooks  identity, numbers of hooks               the copies are rebuilt

Before each step the copies are as the root is. A step runs on several replicas, and each does to itself what the step
does to the module; what it has done to the root stays. Where the root has no samples it takes over the buffers of the
first replica that has, and the tensors that hooks compute before each forward. Hooks on parameters are the root's
alone, which gives them the gradients of all replicas. A step that leaves other attributes or hooks than it found gets
whole batches (`batch/exact/trial.py`).
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..core.module_checks import recompute_weights
from ..core.patching import HOOKS
from ._module_copy import ModuleCopy, plain_modules
from ._parameter_copies import follow, write


class Replicas:
    """One replica of a module per device.

    Args:
        root: the module, on `devices[0]`.
        devices: one per replica; they may repeat and mix.
        one_by_one: see `_parameter_copies.py`.
    """

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
        """Copy what changed on the root since the last refresh.

        Returns:
            Whether the copies were rebuilt because modules, parameters or hooks were added or replaced.
        """
        if self._structure != self._read_structure():
            self._make()
            return True
        if self._versions != (now := self._read_versions()):
            write(self._parameters, self._parameter_copies)
            if self._slots:
                self._refresh_buffers()
            self._versions = now
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
