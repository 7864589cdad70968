"""Solve for the distribution of samples that costs least, by what samples cost on each device."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal, TypeAlias

from ..core.errors import ConfigError

Objective: TypeAlias = Literal["time", "memory"]
"""Quantity to equalize: the time that devices take, or the fraction of their memory that they fill."""


@dataclass(frozen=True)
class DeviceCost:
    """Cost of samples on one device.

    Args:
        seconds_per_sample: seconds per additional sample.
        fixed_seconds: seconds per chunk, whatever its size; a device without samples takes none.
        bytes_per_sample: bytes per additional sample.
        fixed_bytes: bytes used without any sample (parameters, gradients, optimizer).
        limit_bytes: memory of the device in bytes.
    """

    seconds_per_sample: float = 0.0
    fixed_seconds: float = 0.0
    bytes_per_sample: float = 0.0
    fixed_bytes: float = 0.0
    limit_bytes: float = math.inf

    def load(self, num_samples: int, objective: Objective) -> float:
        """Seconds that a chunk takes, or the fraction of the device's memory that it fills; bytes if without limit."""
        if objective == "time":
            return self.fixed_seconds + num_samples * self.seconds_per_sample if num_samples else 0.0
        used = self.fixed_bytes + num_samples * self.bytes_per_sample
        return used if math.isinf(self.limit_bytes) else used / self.limit_bytes

    def fits(self, num_samples: int) -> bool:
        """Whether the device has the memory for a chunk."""
        return self.fixed_bytes + num_samples * self.bytes_per_sample <= self.limit_bytes


def solve(num_samples: int, costs: Sequence[DeviceCost], objective: Objective = "time") -> list[int]:
    """Find the sizes that minimize the largest time or memory of all devices.

    Samples are assigned one by one to the device that then has the smallest load, among those with room. Because costs
    only grow with samples, no other distribution has a smaller maximum.

    Raises:
        ConfigError: the batch does not fit on all devices together.
    """
    sizes = [0] * len(costs)
    heap = [(cost.load(1, objective), i) for i, cost in enumerate(costs) if cost.fits(1)]
    heapq.heapify(heap)
    for done in range(num_samples):
        if not heap:
            raise ConfigError(
                f"balance: a batch of {num_samples} samples does not fit: by the measurements, the devices hold "
                f"{done} together. Use a smaller batch, more devices, or accumulate_grad_batches."
            )
        _, i = heapq.heappop(heap)
        sizes[i] += 1
        if costs[i].fits(sizes[i] + 1):
            heapq.heappush(heap, (costs[i].load(sizes[i] + 1, objective), i))
    return sizes


def largest_load(sizes: Sequence[int], costs: Sequence[DeviceCost], objective: Objective) -> float:
    """Largest time in seconds, or memory, of all devices, which `solve` minimizes."""
    return max(cost.load(size, objective) for cost, size in zip(costs, sizes, strict=True))


def with_equal_others(costs: Sequence[DeviceCost]) -> list[DeviceCost]:
    """Replace the costs of every device but the first by the worst among them, in time and memory."""
    others = costs[1:]
    worst = DeviceCost(*map(max, zip(*map(astuple, others), strict=True)))
    worst = replace(worst, limit_bytes=min(cost.limit_bytes for cost in others))
    return [costs[0], *([worst] * len(others))]
