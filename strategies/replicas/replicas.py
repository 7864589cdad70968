"""Keep replicas of a module: made once per device, refreshed only when the root's tensors change.

The first replica is the root module itself. A refresh copies:

    changed on the root                  detected by                              action
    parameters                           versions; `mark_changed`; `.data` used   one coalesced copy per device
    buffers                              versions, the copy's own too; identity   one coalesced copy per device
    attributes, `training`               values of the modules' `__dict__`        set on the copies
    hooks                                their numbers                            set on the copies
    modules or parameters added          identity                                 the copies are rebuilt

A step runs on several replicas, and each does to itself what the step does to the module. So the hooks that a step
registered and the objects that it made stay each replica's own; numbers, strings and tensors that it assigned become
those of the first replica that ran, and a replica that had no samples takes everything from the root. Where the root
has none, `_stand_in.py` does to it what the first one did to itself. Hooks on parameters are the root's alone, which
gives them the gradients of all replicas.
"""

import itertools
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from ..core.devices import broadcast_coalesced
from ..core.module_checks import is_metric
from ._hidden_writes import HiddenWrites, is_shared
from ._module_copy import ModuleCopy
from ._seen import Seen
from ._stand_in import StandIn
from ._step_hooks import StepHooks


class Replicas:
    """One replica of a module per device.

    Args:
        root: the module, on `devices[0]`.
        devices: one per replica; they may repeat and mix.
        blocks: the devices of each replica, where the root's tensors are on several.

    Attributes:
        num_copied_parameters: parameters copied since the replicas were made, each counted once per device.
    """

    def __init__(
        self, root: nn.Module, devices: Sequence[torch.device], blocks: Sequence[Sequence[torch.device]] = ()
    ) -> None:
        self.root = root
        self.devices = list(devices)
        self._places = [dict(zip(blocks[0], block, strict=True)) for block in blocks[1:]] or [None] * len(devices[1:])
        self.num_copied_parameters = 0
        self._hidden_writes = HiddenWrites(())
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

    def close(self) -> None:
        """Stop watching the root's parameters."""
        self._hidden_writes.close()

    def mark_changed(self, frozen: bool = True, trained: bool = True) -> None:
        """Make the next refresh copy parameters, whatever is known of writes to them.

        Args:
            frozen: those that don't require a gradient.
            trained: those that do.
        """
        self._changed |= {i for i, p in enumerate(self._parameters) if (trained if p.requires_grad else frozen)}

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

    def before_step(self, used: Sequence[int]) -> None:
        """Remember what the root takes over from a replica that runs the first chunk in its place.

        Args:
            used: the replicas that have samples.
        """
        self._used = list(used)
        copies = [self._copies[i - 1] for i in used if i > 0]
        self._hooks = StepHooks(self._modules, self._named, copies, with_root=used[0] == 0)
        self._stand_in = StandIn(copies[0], self.devices[0]) if used[0] > 0 else None

    def after_step(self) -> bool:
        """Note what the step did to the root; where it had no sample, take over what the step did to the first chunk's.

        Buffers are those of the training step only, as evaluation changes none.

        Returns:
            Whether the step registered hooks.
        """
        hooks, stand_in = self._hooks, self._stand_in
        registered = hooks.are_registered
        if registered:
            hooks.verify()
        taken = hooks.take() if registered else []
        if stand_in is not None:
            if self.root.training:
                with torch.inference_mode(False), torch.no_grad():
                    _broadcast(self._buffers(self._used[0]), [self._buffers(0)])
            stand_in.hand_over(everything=registered and stand_in.return_hooks(hooks.first, taken))
        if registered:
            hooks.pair()
        for seen, module in zip(self._seen, self._modules, strict=True):
            seen.note_step(module)
        self._idle |= set(range(1, len(self))) - set(self._used)
        return registered

    def _make(self) -> None:
        self._copies = [
            ModuleCopy(self.root, self.devices[0], device, places=places)
            for device, places in zip(self.devices[1:], self._places, strict=True)
        ]
        self._modules = _plain_modules(self.root)
        self._changed: set[int] = set()
        self._slots = list(_parameter_slots(self._modules))
        self._parameters: list[Any] = [module._parameters[name] for module, name in self._slots]
        self._named = [(name, parameter) for (_, name), parameter in zip(self._slots, self._parameters, strict=True)]
        self._hidden_writes.close()
        self._hidden_writes = HiddenWrites(self._parameters)
        self._parameter_copies = [[copy.counterpart(p) for p in self._parameters] for copy in self._copies]
        self._versions = [_version(parameter) for parameter in self._parameters]
        self._children = [tuple(module._modules.values()) for module in self._modules]
        self._buffer_slots = [
            (module, name) for module in self._modules for name, buffer in module._buffers.items() if buffer is not None
        ]
        self._buffer_versions = self._versions_of_buffers()
        self._seen = [Seen(module) for module in self._modules]
        self._used: list[int] = []
        self._idle: set[int] = set()
        self._stand_in: StandIn | None = None

    def _has_new_structure(self) -> bool:
        parameters = [module._parameters.get(name) for module, name in self._slots]
        children = [tuple(module._modules.values()) for module in self._modules]
        return children != self._children or not all(map(is_, parameters, self._parameters))

    def _refresh_parameters(self) -> None:
        versions = [_version(parameter) for parameter in self._parameters]
        # what needs no gradient and whose memory others hold, who may write to it
        shared = {i for i, p in enumerate(self._parameters) if not p.requires_grad and is_shared(p)}
        marked = self._changed | self._hidden_writes.take() | shared
        changed = [i for i, version in enumerate(versions) if version != self._versions[i] or i in marked]
        sources = [self._parameters[i] for i in changed]
        _broadcast(sources, [[copies[i] for i in changed] for copies in self._parameter_copies])
        for copies in self._parameter_copies:
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
        buffers = self._buffers(0)
        # new tensors, because a graph may still need the old values
        copies = [
            [torch.empty_like(buffer, device=old.device) for buffer, old in zip(buffers, self._buffers(i), strict=True)]
            for i in range(1, len(self))
        ]
        _broadcast(buffers, copies)
        for i, own in enumerate(copies, start=1):
            for (module, name), copy in zip(self._buffer_slots, own, strict=True):
                self.counterpart(i, module)._buffers[name] = copy
        self._buffer_versions = self._versions_of_buffers()

    def _refresh_attributes(self) -> None:
        for seen, module in zip(self._seen, self._modules, strict=True):
            if seen.is_current(module):
                continue
            for i, copy in enumerate(self._copies, start=1):
                copy.update(module, seen.changed(module, own_step=i not in self._idle), seen.hooks(i in self._idle))
            seen.refresh(module)
        self._idle.clear()


def _broadcast(sources: Sequence[Tensor], targets: Sequence[Sequence[Tensor]]) -> None:
    """Copy tensors to the replicas, those of one device together."""
    for group in by_device(sources):
        broadcast_coalesced([sources[i] for i in group], [[target[i] for i in group] for target in targets])


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors by their device; a module that is not cut into stages is one group."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return list(groups.values())


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
