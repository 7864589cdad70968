"""Compute the share of each device from measured times, and decide when to adopt new shares.

All this is numbers, without devices, clocks or processes, so replicas and ranks share it.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, linear_regression, median
from typing import Annotated, Any, TypeAlias

from pytorch_lightning.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from ..batch.policies import Even, Policy, Weighted
from ..core.options import Limit

Hysteresis: TypeAlias = Annotated[float, Limit(">=", 0), Limit("<", 1)]
"""Fraction of the largest time that new shares must save to be adopted."""

Timed: TypeAlias = tuple[int, float]
"""Samples of a chunk, and its time in units of what the devices took per sample, on the average, in the same step."""

LARGEST_CUT = 0.5
"""Minimum fraction of its samples that a device keeps in one change: far from measured sizes, costs are guesses."""

MIN_MEASUREMENTS = 6
"""Measurements of every device at its current size before shares change: the median of fewer may be noise."""

DISTINCT_SIZES = 1.25
"""Ratio of largest to smallest measured size from which a line is fitted to find the fixed time."""

SMALLEST_SLOPE = 0.1
"""Smallest fraction of a chunk's time that is attributed to its samples, whatever a noisy fit gives."""


@dataclass(eq=False)
class BalanceController(Policy):
    """Computes shares of the batch from measurements, and keeps them until others are clearly better.

    A device's time is the median of its last measurements, so that one slow step changes nothing. Until a device was
    measured at two clearly different sizes, its time is assumed proportional to its samples; then a fitted line gives
    the fixed time per chunk. Without it, a device would look slower the fewer samples it has, and lose them all.

    Other programs may slow all devices at once, and each at random. Devices are therefore compared within each step,
    by their time relative to the common one: shares change only if what they gain exceeds the scatter of these ratios.

    Args:
        hysteresis: fraction of the largest time that new shares must save to be adopted; if the devices' times scatter
            relative to each other, they must save more than that explains.
        warmup: number of first measurements to discard, because first steps are slow.
        window: number of measurements of one size that count; of all sizes, three times as many.
    """

    hysteresis: float = 0.02
    warmup: int = 2
    window: int = 16

    def __post_init__(self) -> None:
        self._shares: list[float] | None = None
        self._reset(0)

    def begin(self, num_devices: int) -> None:
        """Begin a run on as many devices, or ranks; what was measured on another number of them is forgotten."""
        if self._shares is not None and len(self._shares) != num_devices:
            rank_zero_info(f"balance: shares are for {len(self._shares)} devices, not {num_devices}; measuring again.")
            self._shares = None
        if self.num_devices != num_devices:
            self._reset(num_devices)

    def _reset(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self._times = [deque[Timed](maxlen=3 * self.window) for _ in range(num_devices)]
        self._last_seconds = [0.0] * num_devices
        self._num_observed = self._full_batch = 0
        self._needed = MIN_MEASUREMENTS

    @property
    def shares(self) -> list[float]:
        """Fraction of a batch for each device; they sum to 1."""
        return self._shares or [1 / self.num_devices] * self.num_devices

    @property
    def policy(self) -> Policy:
        """Cuts batches by the present shares; evenly until there are measurements."""
        return Even() if self._shares is None else Weighted(tuple(self._shares))

    @property
    def efficiency(self) -> float:
        """Mean over largest time of the devices in the last measurement: 1 if all were busy all the time."""
        largest = max(self._last_seconds)
        return sum(self._last_seconds) / len(self._last_seconds) / largest if largest > 0 else 1.0

    @override
    def sizes(self, num_samples: int, num_parts: int) -> list[int]:
        return self.policy.sizes(num_samples, num_parts)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> bool:
        """Record a step's samples and seconds per device, and adopt shares that are better by more than the hysteresis.

        Batches smaller than the largest so far, or that leave a device without samples, are ignored: fixed costs weigh
        more in them. Returns whether the shares changed.
        """
        self._num_observed += 1
        if self._num_observed <= self.warmup or sum(sizes) < self._full_batch or not all(sizes):
            return False
        self._full_batch = sum(sizes)
        self._last_seconds = [max(float(time), 1e-9) for time in seconds]
        common = geometric_mean(time / size for size, time in zip(sizes, self._last_seconds, strict=True))
        for times, size, time in zip(self._times, sizes, self._last_seconds, strict=True):
            times.append((size, time / common))
        now = self.sizes(self._full_batch, self.num_devices)
        measured = [
            [timed for timed in times if timed[0] == size][-self.window :]
            for size, times in zip(now, self._times, strict=True)
        ]
        if min(map(len, measured)) < self._needed:
            return False
        costs = [_fitted(list(times), self.window) for times in self._times]
        best = solve(self._full_batch, costs)
        scatter = (_relative_error([time / size for size, time in times]) for times in measured)
        if largest_time(best, costs) >= (1 - max(self.hysteresis, *scatter)) * largest_time(now, costs):
            return False
        # towards the best sizes as far as every device keeps its `LARGEST_CUT`
        cuts = [old - new for old, new in zip(now, best, strict=True)]
        way = min([1.0, *((1 - LARGEST_CUT) * old / cut for old, cut in zip(now, cuts, strict=True) if cut > 0)])
        self._shares = [(old - way * cut) / self._full_batch for old, cut in zip(now, cuts, strict=True)]
        self._needed = min(self._needed + 2, self.window)
        return True

    def metrics(self) -> dict[str, float]:
        """Share and seconds of each device, and the efficiency, by name in the log."""
        values = {"balance/efficiency": self.efficiency}
        for i, share in enumerate(self.shares):
            values |= {f"balance/share_{i}": share, f"balance/time_s_{i}": self._last_seconds[i]}
        return values

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the shares to a checkpoint that is about to be written."""
        if self._shares is not None:
            checkpoint["balance"] = {"shares": self._shares}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the shares of a checkpoint for the next run; older ones hold measurements, too."""
        shares = checkpoint.get("balance", {}).get("shares")
        if shares and all(shares):  # a device without samples can't be measured
            self._shares = shares


def _fitted(times: Sequence[Timed], window: int) -> tuple[float, float]:
    """Split a device's times, the newest last, into a fixed one per chunk and one per sample."""
    by_size: dict[int, list[float]] = {}
    for size, time in times:
        by_size.setdefault(size, []).append(time)
    points = {size: median(values[-window:]) for size, values in by_size.items()}
    size = times[-1][0]
    proportional = points[size] / size
    if max(points) < DISTINCT_SIZES * min(points):
        return 0.0, proportional
    slope, _ = linear_regression(list(points), list(points.values()))
    slope = min(max(slope, SMALLEST_SLOPE * proportional), proportional)
    return points[size] - slope * size, slope


def _relative_error(values: Sequence[float]) -> float:
    """Estimate how far the median of some measurements may be off, relative to it.

    Work of other programs comes in bursts, so that nothing is assumed of the distribution: with 99% probability its
    median lies between the k-th smallest and the k-th largest value. Of fewer than nine, which are too few for k = 1,
    the width between smallest and largest is extended in proportion.
    """
    ordered, middle, k = sorted(values), median(values), max(1, len(values) // 4 - 1)
    width = max(middle - ordered[k - 1], ordered[-k] - middle)
    return width * max(1.0, 9 / len(values)) / middle


def solve(num_samples: int, costs: Sequence[tuple[float, float]]) -> list[int]:
    """Find the sizes, none of them 0, that minimize the largest time of all devices.

    Samples are assigned one by one to the device that then takes the least time. Because times only grow with samples,
    no other distribution has a smaller maximum.

    Args:
        num_samples: samples of the batch, at least as many as devices.
        costs: of each device its time per chunk, whatever the size, and per sample.
    """
    sizes = [1] * len(costs)
    heap = [(fixed + 2 * per_sample, i) for i, (fixed, per_sample) in enumerate(costs)]
    heapq.heapify(heap)
    for _ in range(num_samples - len(costs)):
        time, i = heap[0]
        sizes[i] += 1
        heapq.heapreplace(heap, (time + costs[i][1], i))
    return sizes


def largest_time(sizes: Sequence[int], costs: Sequence[tuple[float, float]]) -> float:
    """The time of the slowest device."""
    return max(fixed + size * per_sample for size, (fixed, per_sample) in zip(sizes, costs, strict=True))
