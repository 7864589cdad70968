"""Compute the share of each device from measurements, and decide when to adopt new shares.

Both are pure functions of numbers, without devices, clocks or processes, so replicas and ranks share them.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Annotated, Any, NamedTuple, TypeAlias

from ..batch.policies import Weighted
from ..core.options import Limit
from ._estimates import fitted_times, relative_error
from ._solver import DeviceCost, Objective, largest_load, solve, with_equal_others

Hysteresis: TypeAlias = Annotated[float, Limit(">=", 0), Limit("<", 1)]
"""Fraction of the largest time or memory that new shares must save to be adopted."""

LARGEST_CUT = 0.5
"""Minimum fraction of its samples that a device keeps in one change: far from measured sizes, costs are guesses."""

MIN_MEASUREMENTS: dict[Objective, int] = {"time": 6, "memory": 3}
"""Measurements of every device at its current size before shares change: the median of fewer may be noise."""

SHARED_CHANGE = 1.25
"""Ratio of the devices' common time per sample, then and now, from which old times are scaled to now's."""

_DECIDED = {"fixed_bytes", "num_observed", "full_batch", "shares", "needed"}
"""What the state has beside the measurements, by the names of attributes."""


class Timed(NamedTuple):
    """A measured chunk: samples, seconds, the devices' common seconds per sample, and which devices had samples."""

    size: int
    seconds: float
    level: float
    together: tuple[int, ...]


@dataclass(eq=False)
class BalanceController:
    """Computes shares of the batch from measurements, and keeps them until others are clearly better.

    A device's seconds are medians of its last measurements, so that one slow step changes nothing. Until a device was
    measured at two clearly different sizes, its seconds are assumed proportional to its samples; then a fitted line
    gives the fixed time per chunk. Without it, a device would look slower the fewer samples it has, and lose them all.

    Other programs may slow all devices at once, and each at random. Devices are therefore compared within each step,
    by their time relative to the common one: shares change only if what they gain exceeds the scatter of these ratios.

    Args:
        num_devices: number of devices or ranks.
        objective: quantity to equalize.
        hysteresis: fraction of the largest time or memory that new shares must save to be adopted; if the devices'
            times scatter relative to each other, they must save more than that explains.
        warmup: number of first measurements to discard, because first steps are slow.
        window: number of measurements of one size that count; of all sizes, three times as many.
        only_first: only find the first device's share; the others share the rest evenly.
        limit_bytes: memory per device in bytes; None for no limit.
    """

    num_devices: int
    objective: Objective = "time"
    hysteresis: float = 0.02
    warmup: int = 2
    window: int = 16
    only_first: bool = False
    limit_bytes: Sequence[float] | None = None

    def __post_init__(self) -> None:
        num = self.num_devices
        self._fixed_bytes = [0.0] * num
        self._seconds: list[deque[Timed]] = [deque(maxlen=3 * self.window) for _ in range(num)]
        self._bytes: list[deque[float]] = [deque(maxlen=self.window) for _ in range(num)]
        self._last_seconds = [0.0] * num
        self._num_observed = 0
        self._full_batch = 0
        self._shares: list[float] | None = None
        self._needed = MIN_MEASUREMENTS[self.objective]

    @property
    def shares(self) -> list[float]:
        """Fraction of a batch for each device; they sum to 1."""
        return self._shares or [1 / self.num_devices] * self.num_devices

    @property
    def efficiency(self) -> float:
        """Mean over largest time of the devices in the last measurement: 1 if all were busy all the time."""
        largest = max(self._last_seconds)
        return sum(self._last_seconds) / len(self._last_seconds) / largest if largest > 0 else 1.0

    def propose(self, num_samples: int) -> list[int]:
        """Propose samples per device for a batch of `num_samples`; even until there are measurements."""
        return Weighted(tuple(self.shares)).sizes(num_samples, self.num_devices)

    def observe(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        used_bytes: Sequence[float] | None = None,
        fixed_bytes: Sequence[float] | None = None,
    ) -> bool:
        """Record a step's measurements, and adopt new shares if they are better by more than the hysteresis.

        Batches smaller than the largest so far are ignored, because fixed costs weigh more in them.

        Args:
            sizes: samples per device.
            seconds: seconds per device; ignored for a device without samples.
            used_bytes: bytes per device that its samples took; None if memory was not measured.
            fixed_bytes: bytes per device that are used without samples; None keeps the last value.

        Returns:
            Whether the shares changed.
        """
        self._num_observed += 1
        if self._num_observed <= self.warmup or sum(sizes) < self._full_batch:
            return False
        self._full_batch = sum(sizes)
        self._fixed_bytes = list(fixed_bytes or self._fixed_bytes)
        self._last_seconds = [float(value) for value in seconds]
        together = tuple(i for i, size in enumerate(sizes) if size > 0)
        # seconds per sample that all devices with samples share in this step
        level = geometric_mean(max(seconds[i], 1e-9) / sizes[i] for i in together)
        for i, size in enumerate(sizes):
            if size > 0:
                self._seconds[i].append(Timed(size, float(seconds[i]), level, together))
                if used_bytes is not None:
                    self._bytes[i].append(used_bytes[i] / size)
        return self._resolve()

    def metrics(self) -> dict[str, float]:
        """Share, seconds and bytes per sample of each device, and the efficiency, by name in the log."""
        values = {"balance/efficiency": self.efficiency}
        for i, share in enumerate(self.shares):
            values[f"balance/share_{i}"] = share
            values[f"balance/time_s_{i}"] = self._last_seconds[i]
            values[f"balance/bytes_per_sample_{i}"] = max(self._bytes[i], default=0.0)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return measurements and shares in plain lists."""
        measured: dict[str, Any] = {
            "seconds": [[[*t[:3], list(t.together)] for t in values] for values in self._seconds],
            "bytes": [list(values) for values in self._bytes],
        }
        return measured | {name: getattr(self, f"_{name}") for name in _DECIDED}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load the state of a checkpoint; False if it was measured on another number of devices, and was not loaded."""
        if len(state["seconds"]) != self.num_devices:
            return False
        for own, values in zip(self._seconds, state["seconds"], strict=True):
            own.clear()
            # a checkpoint of an older version has samples and seconds only, which can't be compared within steps
            own.extend(Timed(t[0], t[1], t[2], tuple(t[3])) for t in values if len(t) == len(Timed._fields))
        self._bytes = [deque(values, maxlen=self.window) for values in state["bytes"]]
        for name in _DECIDED & state.keys():
            setattr(self, f"_{name}", state[name])
        return True

    def costs(self) -> list[DeviceCost]:
        """Estimate the cost of samples on each device from the measurements so far."""
        times = [fitted_times(_as_now(values, self.window), self.window) for values in self._seconds]
        limits = self.limit_bytes or [math.inf] * self.num_devices
        largest = [max(values, default=0.0) for values in self._bytes]
        parts = zip(times, largest, self._fixed_bytes, limits, strict=True)
        costs = [DeviceCost(slope, fixed, per_sample, *memory) for (fixed, slope), per_sample, *memory in parts]
        return with_equal_others(costs) if self.only_first and len(costs) > 2 else costs

    def _resolve(self) -> bool:
        costs, num_samples = self.costs(), self._full_batch
        measured = self._measured_now()
        counted = measured if self.objective == "time" else self._bytes
        if any(len(values) < self._needed for values in counted) or not num_samples:
            return False
        solved = solve(num_samples, costs, self.objective)
        now = largest_load(self.propose(num_samples), costs, self.objective)
        if largest_load(solved, costs, self.objective) >= (1 - self._least_gain(measured)) * now:
            return False
        if self.objective == "time":
            solved = cautious(self.propose(num_samples), solved)
        self._shares = [size / num_samples for size in solved]
        self._needed = min(self._needed + 2, self.window)
        return True

    def _measured_now(self) -> list[list[Timed]]:
        """Each device's last chunks of its current size; of all sizes for a device without samples."""
        sizes = self.propose(self._full_batch)
        return [
            [timed for timed in values if timed.size == size or not size][-self.window :]
            for size, values in zip(sizes, self._seconds, strict=True)
        ]

    def _least_gain(self, measured: Sequence[Sequence[Timed]]) -> float:
        """Fraction of the largest load that new shares must save."""
        if self.objective == "memory":
            return self.hysteresis
        ratios = [[timed.seconds / timed.size / timed.level for timed in values] for values in measured]
        return max(self.hysteresis, *map(relative_error, ratios))


def _as_now(values: Sequence[Timed], window: int) -> list[tuple[int, float]]:
    """Samples and seconds of a device's chunks, without what all devices shared in a step.

    A chunk's time relative to the common one is multiplied by the median of the common times while chunks had its size;
    if that has clearly changed since, by the present one. (Fixed times change it, too, but by less.)
    """
    if not values:
        return []
    together = values[-1].together
    same = [timed for timed in values if timed.together == together]
    levels = {
        size: median([timed.level for timed in same if timed.size == size][-window:])
        for size in {timed.size for timed in same}
    }
    now = levels[values[-1].size]
    for size, level in levels.items():
        if max(now / level, level / now) > SHARED_CHANGE:
            levels[size] = now
    return [
        (timed.size, timed.seconds / timed.level * levels[timed.size] if timed.together == together else timed.seconds)
        for timed in values
    ]


def cautious(now: Sequence[int], solved: Sequence[int]) -> list[float]:
    """Move from one distribution towards another, while every device keeps at least `LARGEST_CUT` of its samples.

    Args:
        now: current samples per device.
        solved: target samples per device, from the measurements.

    Returns:
        Samples per device, not rounded, with the sum of `solved`.
    """
    cuts = [old - new for old, new in zip(now, solved, strict=True)]
    allowed = [(1 - LARGEST_CUT) * old / cut for old, cut in zip(now, cuts, strict=True) if cut > 0]
    part = min([1.0, *allowed])
    return [old - part * cut for old, cut in zip(now, cuts, strict=True)]
