"""Keep replicas of a module: made once per device, refreshed only when the root's tensors change.

The first replica is the root module itself. A refresh copies:

    changed on the root                  detected by                              action
    parameters                           versions; `mark_changed`                 one coalesced copy per device
    buffers                              versions, the copy's own too; identity   one coalesced copy per device
    attributes, `training`               values of the modules' `__dict__`        set on the copies
    modules, parameters, or their hooks  identity, numbers of hooks               the copies are rebuilt

Before each step the copies are as the root is. A step runs on several replicas, and each does to itself what the step
does to the module; what it has done to the root stays. Where the root has no samples it takes over buffers, numbers,
strings and tensors of the first replica that has. Hooks on parameters are the root's alone, which gives them the
gradients of all replicas. A step that leaves other hooks than it found gets whole batches (`batch/exact/trial.py`).
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from numbers import Number
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import MetricCollection

from ..core.devices import broadcast_coalesced
from ..core.module_checks import is_metric
from ..core.patching import HOOKS
from ._module_copy import ModuleCopy
from ._parameter_copies import Flows, copied, follow


class Replicas:
    """One replica of a module per device.

    Args:
        root: the module, on `devices[0]`.
        devices: one per replica; they may repeat and mix.
        blocks: the devices of each replica, where the root's tensors are on several.
        flows: called in a backward pass; see `_parameter_copies.py`.
        one_by_one: likewise.

    Attributes:
        num_copied_parameters: parameters copied since the replicas were made, each counted once per device.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[torch.device],
        blocks: Sequence[Sequence[torch.device]] = (),
        flows: Flows = lambda: True,
        one_by_one: bool = False,
    ) -> None:
        self.root = root
        self._new_parameter = partial(copied, flows=flows)
        self._flows, self._one_by_one = flows, one_by_one
        self.devices = list(devices)
        self._places = [dict(zip(blocks[0], block, strict=True)) for block in blocks[1:]] or [None] * len(devices[1:])
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

    def mark_changed(self) -> None:
        """Make the next refresh copy parameters and buffers, whatever is known of writes to them."""
        self._is_changed = True

    def refresh(self) -> bool:
        """Copy what changed on the root since the last refresh.

        Returns:
            Whether the copies were rebuilt because modules, parameters or hooks were added or replaced.
        """
        if self._has_new_structure():
            self._make()
            return True
        may_differ = self._is_changed  # a write through `.data` raises no version
        self._refresh_parameters()
        if self._buffer_slots and (may_differ or self._versions_of_buffers() != self._buffer_versions):
            self._refresh_buffers()
        self._refresh_attributes()
        return False

    def before_step(self, used: Sequence[int]) -> None:
        """Remember what the root takes over from the first of the replicas that have samples."""
        self._used = list(used)
        self._before = [] if used[0] == 0 else [module.__dict__.copy() for _, module in self._copies[used[0] - 1].pairs]

    def after_step(self) -> None:
        """Have the root take over what it has missed.

        Buffers are those of the training step only, as evaluation changes none.
        """
        if not self._before:
            return
        if self.root.training:
            _broadcast(self._buffers(self._used[0]), [self._buffers(0)])
        for (root, module), before in zip(self._copies[self._used[0] - 1].pairs, self._before, strict=True):
            for key, value in module.__dict__.items():
                if value is not before.get(key) and key != "_device" and _is_plain(value):
                    value = value.detach().to(self.devices[0]) if isinstance(value, Tensor) else value
                    root.__dict__[key] = value

    def _make(self) -> None:
        self._copies = [
            ModuleCopy(self.root, self.devices[0], device, self._new_parameter, places)
            for device, places in zip(self.devices[1:], self._places, strict=True)
        ]
        self._modules = _plain_modules(self.root)
        self._is_changed = False
        self._slots = list(_parameter_slots(self._modules))
        self._parameters: list[Any] = [module._parameters[name] for module, name in self._slots]
        self._parameter_copies = [[copy.counterpart(p) for p in self._parameters] for copy in self._copies]
        self._follow()
        self._versions = [_version(parameter) for parameter in self._parameters]
        self._children = [tuple(module._modules.values()) for module in self._modules]
        self._buffer_slots = [
            (module, name) for module in self._modules for name, buffer in module._buffers.items() if buffer is not None
        ]
        self._buffer_versions = self._versions_of_buffers()
        self._known = [module.__dict__.copy() for module in self._modules]
        self._hooks = [module.__dict__[key] for module in self._modules for key in HOOKS]
        self._hook_numbers, self._num_hooks = [*map(tuple, self._hooks)], [*map(len, self._hooks)]
        self._next_hook = RemovableHandle.next_id
        self._used: list[int] = []
        self._before: list[dict[str, Any]] = []
        """What the first replica that has samples held before the step, if that is not the root."""

    def _has_new_structure(self) -> bool:
        parameters = [module._parameters.get(name) for module, name in self._slots]
        children = [tuple(module._modules.values()) for module in self._modules]
        is_same = children == self._children and all(map(is_, parameters, self._parameters))
        return not is_same or self._has_new_hooks()

    def _follow(self) -> None:
        self._hooked = [bool(parameter._backward_hooks) for parameter in self._parameters]
        follow(self._parameters, self._parameter_copies, self._flows, self._one_by_one)

    def _refresh_parameters(self) -> None:
        parameters, versions = self._parameters, [_version(parameter) for parameter in self._parameters]
        frozen = [not parameter.requires_grad for parameter in parameters]
        if self._is_changed or versions != self._versions:
            _broadcast(parameters, self._parameter_copies)
            self.num_copied_parameters += len(parameters) * len(self._copies)
        hooked = [bool(parameter._backward_hooks) for parameter in parameters]
        if hooked != self._hooked or any([copy.is_leaf for copy in own] != frozen for own in self._parameter_copies):
            self._follow()
        self._versions, self._is_changed = versions, False

    def _buffers(self, i: int) -> list[Tensor]:
        """The buffers of replica i."""
        modules = [(self.counterpart(i, module), name) for module, name in self._buffer_slots]
        return [module._buffers[name] for module, name in modules]

    def _versions_of_buffers(self) -> list[Any]:
        return [[(id(buffer), _version(buffer)) for buffer in self._buffers(i)] for i in range(len(self))]

    def _refresh_buffers(self) -> None:
        buffers = self._buffers(0)
        with torch.inference_mode(False):  # new tensors, because a graph may still need the old values
            copies = [
                [torch.empty_like(new, device=old.device) for new, old in zip(buffers, self._buffers(i), strict=True)]
                for i in range(1, len(self))
            ]
        _broadcast(buffers, copies)
        for i, own in enumerate(copies, start=1):
            for (module, name), copy in zip(self._buffer_slots, own, strict=True):
                self.counterpart(i, module)._buffers[name] = copy
        self._buffer_versions = self._versions_of_buffers()

    def _refresh_attributes(self) -> None:
        for i, (module, known) in enumerate(zip(self._modules, self._known, strict=True)):
            now = module.__dict__
            if len(now) == len(known) and all(map(is_, now.values(), known.values())) and [*now] == [*known]:
                continue
            for copy in self._copies:
                copy.update(module, [key for key in known.keys() | now.keys() if now.get(key) is not known.get(key)])
            self._known[i] = now.copy()

    def _has_new_hooks(self) -> bool:
        if RemovableHandle.next_id == self._next_hook and self._num_hooks == [*map(len, self._hooks)]:
            return False
        self._next_hook, self._num_hooks = RemovableHandle.next_id, [*map(len, self._hooks)]
        return self._hook_numbers != [*map(tuple, self._hooks)]


def _broadcast(sources: Sequence[Tensor], targets: Sequence[Sequence[Tensor]]) -> None:
    """Copy tensors to the replicas, those of one device together; a module that is not cut into stages is on one."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(sources):
        groups.setdefault(tensor.device, []).append(i)
    with torch.inference_mode(False), torch.no_grad():
        for group in groups.values():
            broadcast_coalesced([sources[i] for i in group], [[target[i] for i in group] for target in targets])


def _version(tensor: Tensor) -> int:
    """A number that grows with every write to a tensor; always new for inference tensors, which have no version."""
    return next(_UNVERSIONED) if tensor.is_inference() else tensor._version


_UNVERSIONED = itertools.count(-1, -1)


def _plain_modules(root: nn.Module) -> list[nn.Module]:
    """The modules that are copied one by one, root first, each once."""
    found: dict[int, nn.Module] = {}
    left = [root]
    while left:
        module = left.pop()
        if id(module) not in found and not (is_metric(module) or isinstance(module, MetricCollection)):
            found[id(module)] = module
            left += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def _parameter_slots(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, name) of every parameter; for a tied parameter, the first."""
    seen: set[int] = set()
    for module in modules:
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, name


def _is_plain(value: Any) -> bool:
    """Whether a value can't be written to by those who hold it, or is a tensor."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bytes, Number, Tensor, torch.device, torch.dtype, type(None)))
