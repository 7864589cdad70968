"""Cut the state of optimizers over the devices of one process (ZeRO, stage 1, without ranks).

The root device holds the parameters and their gradients, and each other device the optimizer state of some of them.
After the root has updated its own, parameters and gradients are sent to the devices that have their state, which update
them and send them back. The update of an elementwise optimizer is the same, so that the weights are those of a whole
optimizer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..core.devices import to_device
from ..core.errors import ConfigError
from .optimizer_shards import OwnPart


class DeviceShards(OwnPart):
    """Keeps the state of an optimizer on several devices.

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
        self._devices = list(devices)
        super().__init__(optimizer, 0, len(devices))
        self.take_state()

    @override
    def whole_state(self) -> dict[str, Any]:
        """The optimizer's `state_dict`, with the state of all devices."""
        found = self._optimizer.state_dict()
        return {**found, "state": dict(sorted(found["state"].items()))}

    @override
    def take_state(self) -> None:
        """Move the state that was loaded into the optimizer to the devices that keep it."""
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(self._devices[owner])

    @override
    @torch.no_grad()
    def _update_others(self) -> None:
        """Have the other devices update their parameters; transfers and updates of devices are queued side by side."""
        gradients = [parameter.grad for parameter in self._parameters]
        there: dict[int, list[tuple[Any, Tensor, Tensor]]] = {}
        for parameter, owner, gradient in zip(self._parameters, self._owners, gradients, strict=True):
            parameter.grad = None
            if owner and gradient is not None:
                home, device = parameter.data, self._devices[owner]
                parameter.data = to_device(home, device)
                there.setdefault(owner, []).append((parameter, home, to_device(gradient, device)))
        step: Any = type(self._optimizer).step
        for own in there.values():
            for parameter, _, gradient in own:
                parameter.grad = gradient
            step.__wrapped__(self._optimizer)  # without hooks, which have run
            for parameter, *_ in own:
                parameter.grad = None
        for parameter, home, _ in (one for own in there.values() for one in own):
            updated = parameter.data
            parameter.data = home
            if updated.data_ptr() != home.data_ptr():
                home.copy_(to_device(updated, home.device))
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
