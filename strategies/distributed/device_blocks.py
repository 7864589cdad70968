"""Assign devices to processes that own several each. Pure arithmetic over ranks.

With 8 devices and 2 per process:

```
local rank   0      1      2      3
devices      0 1    2 3    4 5    6 7
```

Every node has the same table over its own devices.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

from ..core.errors import ConfigError

T = TypeVar("T")


def verify_one_type(devices: Sequence[torch.device], strategy: str) -> None:
    """Refuse stages of a process whose gradients torch's DDP can't average.

    Raises:
        ConfigError: they are of several types.
    """
    if len({device.type for device in devices}) > 1:
        raise ConfigError(
            f"{strategy}: the stages of a process are on {', '.join(map(str, devices))}, but DDP averages gradients on "
            "devices of one type only. Give each process GPUs or CPUs alone, or choose strategy=model_parallel."
        )


def num_processes(num_devices: int, devices_per_process: int) -> int:
    """Count the processes of one node.

    Args:
        devices_per_process: devices that each process owns.

    Returns:
        `num_devices / devices_per_process`.

    Raises:
        ConfigError: the devices don't divide into whole processes.
    """
    if num_devices < 1 or num_devices % devices_per_process:
        raise ConfigError(
            f"{num_devices} devices don't divide into processes of {devices_per_process} devices. "
            f"Give a multiple of {devices_per_process} devices, or another number of devices per process."
        )
    return num_devices // devices_per_process


def own_devices(devices: Sequence[T], local_rank: int, devices_per_process: int) -> list[T]:
    """Select the devices of one process from those of its node.

    Args:
        devices: all devices of the node, in order.

    Returns:
        `devices_per_process` devices, the process's root device first.
    """
    first = local_rank * devices_per_process
    return list(devices[first : first + devices_per_process])
