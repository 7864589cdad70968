"""Estimate the fixed and the per-sample part of a device's times, and their error."""

import math
from collections.abc import Sequence
from statistics import linear_regression, median

DISTINCT_SIZES = 1.25
"""Ratio of largest to smallest measured size from which a line is fitted to find the fixed time."""

SMALLEST_SLOPE = 0.1
"""Smallest fraction of a chunk's time that is attributed to its samples, whatever a noisy fit gives."""


def fitted_times(pairs: Sequence[tuple[int, float]], window: int) -> tuple[float, float]:
    """Split a device's times into fixed seconds per chunk and seconds per sample.

    Args:
        pairs: (samples, seconds) of its last chunks, the newest last.
        window: number of chunks of each size that count.
    """
    if not pairs:
        return 0.0, 0.0
    by_size: dict[int, list[float]] = {}
    for size, seconds in pairs:
        by_size.setdefault(size, []).append(seconds)
    points = {size: median(values[-window:]) for size, values in by_size.items()}
    size = pairs[-1][0]
    proportional = points[size] / size
    if max(points) < DISTINCT_SIZES * min(points):
        return 0.0, proportional
    slope, _ = linear_regression(list(points), list(points.values()))
    slope = min(max(slope, SMALLEST_SLOPE * proportional), proportional)
    return points[size] - slope * size, slope


def relative_error(values: Sequence[float]) -> float:
    """Estimate how far the median of some measurements may be off, relative to it.

    Work of other programs comes in bursts, so that nothing is assumed of the distribution: with at least 99.5%
    probability its median lies between the k-th smallest and the k-th largest of n values, where less than k of n
    tosses of a coin are heads with at most 0.25%. Fewer than nine values are too few for k = 1, and the width between
    smallest and largest is extended in proportion.
    """
    ordered, num = sorted(values), len(values)
    k = 1
    while sum(math.comb(num, heads) for heads in range(k + 1)) <= _TAIL * 2**num:
        k += 1
    middle = median(ordered)
    width = max(middle - ordered[k - 1], ordered[-k] - middle)
    return width * max(1.0, _FEWEST / num) / middle if middle > 0 else 0.0


_TAIL = 0.0025
_FEWEST = 9
"""Fewest values of which smallest and largest enclose the median with 99.5% probability."""
