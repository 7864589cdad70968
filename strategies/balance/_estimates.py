"""What a device's times tell: what is fixed in them, what grows with samples, and how far they may be off."""

import math
from collections.abc import Sequence
from statistics import median

DISTINCT_SIZES = 1.25
"""Largest over smallest size measured from which on a line through them says what is fixed."""

SMALLEST_SLOPE = 0.1
"""The least part of a chunk's time that is taken to grow with its samples, whatever a noisy line says."""


def fitted_times(pairs: Sequence[tuple[int, float]], window: int) -> tuple[float, float]:
    """Tell what is fixed in a device's times, and what grows with its samples.

    Args:
        pairs: (samples, seconds) of its last chunks, the newest last.
        window: chunks of one size that count.

    Returns:
        Seconds of any chunk, and seconds per sample.
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
    """Tell how far the median of some measurements may be off: its standard error over the median.

    The spread is the median distance to the median, which outliers do not move; 1.4826 times that is a normal
    distribution's standard deviation, and a median's error is 1.2533 times a mean's.

    Args:
        values: at least one.
    """
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * spread / math.sqrt(len(values)) / middle if middle > 0 else 0.0
