"""Solve for the share of each device from what was measured, and decide when new shares are worth a change.

Both parts are pure: devices, clocks and processes enter elsewhere, so replicas and ranks share them.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ..batch.policies import Even, Weighted
from ..core.errors import ConfigError
from ._estimates import fitted_times, relative_error

Objective: TypeAlias = Literal["time", "memory"]
"""What is made equal: the time that devices take, or the part of their memory that they fill."""

LARGEST_CUT = 0.5
"""The part of its samples that a device keeps at least when shares change: away from measured sizes we guess."""

MIN_MEASUREMENTS = 3
"""Measurements of every device at its present size before shares change: the median of fewer may be an accident."""

NOISE_FACTOR = 2.0
"""Standard errors of the times that a gain must exceed: below that it may be an accident, too."""


@dataclass(frozen=True)
class DeviceCost:
    """What samples cost on one device.

    Args:
        seconds_per_sample: seconds that one more sample takes.
        fixed_seconds: seconds that any chunk takes, whatever its size; a device without samples takes none.
        bytes_per_sample: bytes that one more sample needs.
        fixed_bytes: bytes that are taken without any sample (parameters, gradients, optimizer).
        limit_bytes: bytes that the device has.
    """

    seconds_per_sample: float = 0.0
    fixed_seconds: float = 0.0
    bytes_per_sample: float = 0.0
    fixed_bytes: float = 0.0
    limit_bytes: float = math.inf

    def seconds(self, num_samples: int) -> float:
        """Seconds that a chunk takes."""
        return self.fixed_seconds + num_samples * self.seconds_per_sample if num_samples else 0.0

    def memory(self, num_samples: int) -> float:
        """The part of the device's memory that a chunk fills; bytes where the device has no limit."""
        used = self.fixed_bytes + num_samples * self.bytes_per_sample
        return used if math.isinf(self.limit_bytes) else used / self.limit_bytes

    def fits(self, num_samples: int) -> bool:
        """Whether the device has the memory for a chunk."""
        return self.fixed_bytes + num_samples * self.bytes_per_sample <= self.limit_bytes


def solve(num_samples: int, costs: Sequence[DeviceCost], objective: Objective = "time") -> list[int]:
    """Find the sizes that make the largest time, or the fullest memory, as small as it can be.

    One sample after the other goes to the device that has then the least, among those with room. As costs only grow
    with samples, no other distribution has a smaller maximum.

    Args:
        num_samples: samples to distribute.
        costs: one per device.
        objective: what to make small.

    Returns:
        Samples per device; they sum to `num_samples`.

    Raises:
        ConfigError: the devices together have no room for the batch.
    """
    sizes = [0] * len(costs)
    heap = [(_load(cost, 1, objective), i) for i, cost in enumerate(costs) if cost.fits(1)]
    heapq.heapify(heap)
    for done in range(num_samples):
        if not heap:
            raise ConfigError(
                f"balance: a batch of {num_samples} samples does not fit, by what was measured: the devices hold "
                f"{done} together. Use a smaller batch, more devices, or accumulate_grad_batches."
            )
        _, i = heapq.heappop(heap)
        sizes[i] += 1
        if costs[i].fits(sizes[i] + 1):
            heapq.heappush(heap, (_load(costs[i], sizes[i] + 1, objective), i))
    return sizes


def largest_load(sizes: Sequence[int], costs: Sequence[DeviceCost], objective: Objective) -> float:
    """The largest time (seconds), or the fullest memory, of all devices: what `solve` makes small."""
    return max(_load(cost, size, objective) for cost, size in zip(costs, sizes, strict=True))


def _load(cost: DeviceCost, num_samples: int, objective: Objective) -> float:
    return cost.seconds(num_samples) if objective == "time" else cost.memory(num_samples)


class BalanceController:
    """Turns measurements of devices into shares of the batch, and keeps them until others are clearly better.

    A device's seconds are medians of its last measurements, so that one slow step changes nothing. Until it was
    measured at two clearly different sizes they are taken to be proportional to its samples; from then on a line
    through them tells what any chunk takes. Without that, a device would look slower the fewer samples it has, and
    lose them all.

    Args:
        num_devices: devices, or ranks.
        objective: what to make equal.
        hysteresis: the part of the largest time, or memory, that new shares must save to be adopted; where times
            scatter they must save more than the scatter may explain.
        warmup: measurements that are thrown away, as first steps are slow.
        window: measurements of one size that count; of all sizes, three times as many.
        only_first: find the first device's share only; the others share the rest evenly.
        limit_bytes: per device, bytes that it has; None for no limit.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        num_devices: int,
        objective: Objective = "time",
        hysteresis: float = 0.02,
        warmup: int = 2,
        window: int = 16,
        only_first: bool = False,
        limit_bytes: Sequence[float] | None = None,
    ) -> None:
        if objective not in get_args(Objective):
            raise ConfigError(f"balance: objective={objective} is unknown. Choose one of time, memory.")
        if not 0 <= hysteresis < 1:
            raise ConfigError(f"balance: hysteresis={hysteresis} is not a part. Give 0 <= hysteresis < 1.")
        self._num_devices = num_devices
        self._objective: Objective = objective
        self._hysteresis = hysteresis
        self._warmup = warmup
        self._window = window
        self._only_first = only_first
        self._fixed_bytes = [0.0] * num_devices
        self._limit_bytes = list(limit_bytes or [math.inf] * num_devices)
        self._seconds: list[deque[tuple[int, float]]] = [deque(maxlen=3 * window) for _ in range(num_devices)]
        self._bytes: list[deque[float]] = [deque(maxlen=window) for _ in range(num_devices)]
        self._last_seconds = [0.0] * num_devices
        self._num_observed = 0
        self._full_batch = 0
        self._shares: list[float] | None = None
        self._needed = MIN_MEASUREMENTS

    @property
    def shares(self) -> list[float]:
        """The fraction of a batch that each device gets; they sum to 1."""
        return self._shares or [1 / self._num_devices] * self._num_devices

    @property
    def efficiency(self) -> float:
        """Mean over largest time of the devices in the last measurement: 1 where all were busy all the time."""
        largest = max(self._last_seconds)
        return sum(self._last_seconds) / len(self._last_seconds) / largest if largest > 0 else 1.0

    def propose(self, num_samples: int) -> list[int]:
        """Samples per device of a batch of `num_samples`; even until something was measured."""
        if self._shares is None:
            return Even().sizes(num_samples, self._num_devices)
        return Weighted(tuple(self._shares)).sizes(num_samples, self._num_devices)

    def observe(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        used_bytes: Sequence[float] | None = None,
        fixed_bytes: Sequence[float] | None = None,
    ) -> bool:
        """Take a step's measurements, and adopt new shares where they are better by more than the hysteresis.

        Batches smaller than the largest so far do not count: what is fixed weighs more in them.

        Args:
            sizes: samples per device.
            seconds: per device; of one without samples it does not count.
            used_bytes: per device, bytes that its samples took; None where memory was not measured.
            fixed_bytes: per device, bytes that are taken without samples; None keeps the last.

        Returns:
            Whether the shares changed.
        """
        self._num_observed += 1
        if self._num_observed <= self._warmup or sum(sizes) < self._full_batch:
            return False
        self._full_batch = sum(sizes)
        self._fixed_bytes = list(fixed_bytes or self._fixed_bytes)
        self._last_seconds = [float(value) for value in seconds]
        for i, size in enumerate(sizes):
            if size > 0:
                self._seconds[i].append((size, float(seconds[i])))
                if used_bytes is not None:
                    self._bytes[i].append(used_bytes[i] / size)
        return self._resolve()

    def metrics(self) -> dict[str, float]:
        """Share, seconds and bytes per sample of each device, and the efficiency, by their names in the log."""
        values = {"balance/efficiency": self.efficiency}
        for i, share in enumerate(self.shares):
            values[f"balance/share_{i}"] = share
            values[f"balance/time_s_{i}"] = self._last_seconds[i]
            values[f"balance/bytes_per_sample_{i}"] = max(self._bytes[i], default=0.0)
        return values

    def state_dict(self) -> dict[str, Any]:
        """What was measured and decided, in plain lists."""
        return {
            "seconds": [[list(pair) for pair in values] for values in self._seconds],
            "bytes": [list(values) for values in self._bytes],
            "fixed_bytes": self._fixed_bytes,
            "num_observed": self._num_observed,
            "full_batch": self._full_batch,
            "shares": self._shares,
            "needed": self._needed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Take over what a checkpoint holds.

        Returns:
            False where it was measured on another number of devices, and nothing was taken over.
        """
        if len(state["seconds"]) != self._num_devices:
            return False
        self._seconds = [deque(map(tuple, values), maxlen=3 * self._window) for values in state["seconds"]]
        self._bytes = [deque(values, maxlen=self._window) for values in state["bytes"]]
        self._fixed_bytes = state["fixed_bytes"]
        self._num_observed = state["num_observed"]
        self._full_batch = state["full_batch"]
        self._shares = state["shares"]
        self._needed = state.get("needed", MIN_MEASUREMENTS)
        return True

    def costs(self) -> list[DeviceCost]:
        """What samples cost, by the measurements so far."""
        times = [fitted_times(pairs, self._window) for pairs in self._seconds]
        costs = [
            DeviceCost(
                fixed_seconds=times[i][0],
                seconds_per_sample=times[i][1],
                bytes_per_sample=max(self._bytes[i], default=0.0),
                fixed_bytes=self._fixed_bytes[i],
                limit_bytes=self._limit_bytes[i],
            )
            for i in range(self._num_devices)
        ]
        return _with_equal_others(costs) if self._only_first and len(costs) > 2 else costs

    def _resolve(self) -> bool:
        costs, num_samples = self.costs(), self._full_batch
        measured = self._measured_now() if self._objective == "time" else self._bytes
        if any(len(values) < self._needed for values in measured) or not num_samples:
            return False
        solved = solve(num_samples, costs, self._objective)
        now = largest_load(self.propose(num_samples), costs, self._objective)
        if largest_load(solved, costs, self._objective) >= (1 - self._least_gain(measured)) * now:
            return False
        if self._objective == "time":
            solved = cautious(self.propose(num_samples), solved)
        self._shares = [size / num_samples for size in solved]
        self._needed = min(2 * self._needed, self._window)
        return True

    def _measured_now(self) -> list[list[float]]:
        """Seconds of each device's last chunks of its present size; of one without samples, of all sizes."""
        sizes = self.propose(self._full_batch)
        return [
            [seconds for measured, seconds in pairs if measured == size or not size][-self._window :]
            for size, pairs in zip(sizes, self._seconds, strict=True)
        ]

    def _least_gain(self, measured: Iterable[Sequence[float]]) -> float:
        """The part of the largest load that new shares must save."""
        if self._objective == "memory":
            return self._hysteresis
        return max(self._hysteresis, *(NOISE_FACTOR * relative_error(values) for values in measured))


def cautious(now: Sequence[int], solved: Sequence[int]) -> list[float]:
    """Go from one distribution towards another as far as every device keeps `LARGEST_CUT` of its samples.

    Args:
        now: samples per device as they are.
        solved: as they should be, by what was measured.

    Returns:
        Samples per device, not whole; the sum is that of `solved`.
    """
    cuts = [old - new for old, new in zip(now, solved, strict=True)]
    allowed = [(1 - LARGEST_CUT) * old / cut for old, cut in zip(now, cuts, strict=True) if cut > 0]
    part = min([1.0, *allowed])
    return [old - part * cut for old, cut in zip(now, cuts, strict=True)]


def _with_equal_others(costs: Sequence[DeviceCost]) -> list[DeviceCost]:
    """Costs where every device but the first is as slow, and as full, as the worst of them."""
    others = costs[1:]
    worst = DeviceCost(
        seconds_per_sample=max(cost.seconds_per_sample for cost in others),
        fixed_seconds=max(cost.fixed_seconds for cost in others),
        bytes_per_sample=max(cost.bytes_per_sample for cost in others),
        fixed_bytes=max(cost.fixed_bytes for cost in others),
        limit_bytes=min(cost.limit_bytes for cost in others),
    )
    return [costs[0], *([worst] * len(others))]
