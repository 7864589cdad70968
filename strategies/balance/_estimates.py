"""Estimate the fixed and the per-sample part of a device's times, and their error."""

import math
from collections.abc import Sequence
from statistics import median

DISTINCT_SIZES = 1.25
"""Ratio of largest to smallest measured size from which a line is fitted to find the fixed time."""

SMALLEST_SLOPE = 0.1
"""Smallest fraction of a chunk's time that is attributed to its samples, whatever a noisy fit gives."""


def fitted_times(pairs: Sequence[tuple[int, float]], window: int) -> tuple[float, float]:
    """Split a device's times into a fixed part and a part per sample.

    Args:
        pairs: (samples, seconds) of its last chunks, the newest last.
        window: number of chunks of each size that count.

    Returns:
        Fixed seconds per chunk, and seconds per sample.
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
    mean_size, mean_seconds = sum(points) / len(points), sum(points.values()) / len(points)
    spread = sum((x - mean_size) ** 2 for x in points)
    slope = sum((x - mean_size) * (y - mean_seconds) for x, y in points.items()) / spread
    slope = min(max(slope, SMALLEST_SLOPE * proportional), proportional)
    return points[size] - slope * size, slope


def relative_error(values: Sequence[float]) -> float:
    """Estimate the relative standard error of the median of some measurements.

    It uses the median absolute deviation, which is robust to outliers: 1.4826 times that is the standard deviation of
    a normal distribution, and the standard error of a median is 1.2533 times that of a mean.

    Args:
        values: measurements, at least one.
    """
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * spread / math.sqrt(len(values)) / middle if middle > 0 else 0.0
