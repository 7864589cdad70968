"""Cut the state of optimizers over the devices of one process (ZeRO, stage 1, without ranks).

The root device holds the parameters and their gradients. Each other device keeps the optimizer state of some of them:
after the root has updated its own, a device is sent its parameters with their gradients, updates them, and sends them
back. The update of an elementwise optimizer is the same, so that the weights are those of a whole optimizer.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..core.devices import to_device
from ..core.errors import ConfigError
from .optimizer_shards import OwnPart, owners


class DeviceShards(OwnPart):
    """The optimizer state of each device.

    Args:
        optimizer: of one of the classes `ELEMENTWISE`, its parameters on the first device.
        devices: the devices of the process, the root device first; they may repeat.
        strategy: name that begins messages.

    Raises:
        ConfigError: the optimizer's step can't be divided.
    """

    def __init__(self, optimizer: Optimizer, devices: Sequence[torch.device], strategy: str) -> None:
        if any(group.get("fused") for group in optimizer.param_groups):
            raise ConfigError(
                f"{strategy}: shard_optimizer=true steps an optimizer per device, but {type(optimizer).__name__} has "
                "fused=True, whose gradient scaling is kept on one. Remove fused=True, or set shard_optimizer=false."
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._devices = list(devices)
        self._stand_ins = {
            i: nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=devices[owner]))
            for i, (parameter, owner) in enumerate(zip(parameters, owners(parameters, len(devices)), strict=True))
            if owner
        }
        """In the place of the parameters that other devices update; without memory between steps."""
        super().__init__(optimizer, 0, len(devices))
        self._others = {owner: self._optimizer_of(owner) for owner in sorted({*self._owners} - {0})}
        self._load(dict(optimizer.state))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of each device, the root's first."""
        return [self._optimizer, *self._others.values()]

    @override
    def whole_state(self) -> dict[str, Any]:
        """The optimizer's `state_dict`, with the state of all devices."""
        found = self._optimizer.state_dict()
        for i, stand_in in self._stand_ins.items():
            state = self._others[self._owners[i]].state
            if stand_in in state:
                found["state"][i] = state[stand_in]
        found["state"] = dict(sorted(found["state"].items()))
        return found

    @override
    def take_state(self) -> None:
        """Move the state that was loaded into the optimizer to the devices that keep it."""
        self._load(dict(self._optimizer.state))

    def _load(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        for i, stand_in in self._stand_ins.items():
            state = states.get(self._parameters[i])
            if state is not None:
                self._others[self._owners[i]].state[stand_in] = {
                    key: value.to(stand_in.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in state.items()
                }
            self._optimizer.state.pop(self._parameters[i], None)

    def _optimizer_of(self, owner: int) -> Optimizer:
        """An optimizer of the same class with the stand-ins of a device."""
        index, groups = 0, list[dict[str, Any]]()
        for group in self._optimizer.param_groups:
            num = len(group["params"])
            own = [self._stand_ins[i] for i in range(index, index + num) if self._owners[i] == owner]
            groups.append({**group, "params": own})
            index += num
        made: Any = type(self._optimizer)
        names = inspect.signature(made.__init__).parameters
        options = {key: value for key, value in self._optimizer.defaults.items() if key in names}
        return made([group for group in groups if group["params"]], **options)

    @override
    @torch.no_grad()
    def _update_others(self) -> None:
        """Have the other devices update their parameters; transfers and updates of devices are queued side by side."""
        groups = self._groups()
        for other in self._others.values():
            for group in other.param_groups:
                options = groups[id(group["params"][0])]
                group.update({key: value for key, value in options.items() if key != "params"})
        for i, stand_in in self._stand_ins.items():
            parameter = self._parameters[i]
            if parameter.grad is not None:
                stand_in.data = to_device(parameter.detach(), stand_in.device)
                stand_in.grad = to_device(parameter.grad.detach(), stand_in.device)
        for other in self._others.values():
            other.step()
        for i, stand_in in self._stand_ins.items():
            if stand_in.grad is not None:
                if stand_in.data_ptr() != self._parameters[i].data_ptr():
                    self._parameters[i].copy_(to_device(stand_in.detach(), self._parameters[i].device))
                else:
                    torch.autograd.graph.increment_version(self._parameters[i])
                stand_in.grad = None
                stand_in.data = stand_in.data.new_empty(0)

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The optimizer's parameter groups, by each stand-in."""
        places = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        return {
            id(self._stand_ins[places[id(parameter)]]): group
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if places.get(id(parameter)) in self._stand_ins
        }
