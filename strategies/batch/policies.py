"""Divide a number of samples into parts: even, a small first part, or weighted. Integers only, no devices.

    policy              N=10, 4 parts     N=3, 4 parts
    Even()              3 3 2 2           1 1 1 0
    FirstChunk(1)       1 3 3 3           1 1 1 0
    FirstChunk(0)       0 4 3 3           0 1 1 1
    Weighted(1,0,2,2)   2 0 4 4           1 0 1 1

Every policy gives sizes that sum to N exactly, none negative; no part is padded and no sample is dropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from typing_extensions import override

from ..core.errors import ConfigError


class Policy:
    """Decides the sizes of the parts of a batch."""

    def sizes(self, num_samples: int, num_parts: int) -> list[int]:
        """The sizes of the parts, in order; they sum to `num_samples` and none is negative."""
        raise NotImplementedError

    def verify(self, num_parts: int, strategy: str) -> None:
        """Refuse options that can't be honoured for `num_parts` parts."""


@dataclass(frozen=True)
class Even(Policy):
    """Equal parts; if the batch does not divide evenly, the first parts take one more sample."""

    @override
    def sizes(self, num_samples: int, num_parts: int) -> list[int]:
        share, rest = divmod(num_samples, num_parts)
        return [share + (part < rest) for part in range(num_parts)]


@dataclass(frozen=True)
class FirstChunk(Policy):
    """A first part of `size` samples, so that its device has room for what it alone holds; the others share the rest.

    A single part takes the whole batch.
    """

    size: int

    @override
    def sizes(self, num_samples: int, num_parts: int) -> list[int]:
        if num_parts == 1:
            return [num_samples]
        first = min(self.size, num_samples)
        return [first, *Even().sizes(num_samples - first, num_parts - 1)]


@dataclass(frozen=True)
class Weighted(Policy):
    """Parts in proportion to weights in any unit, each within one sample of its share; one of weight 0 is empty.

    Source: the method of largest remainders (Hamilton's). Ties go to the earlier part.
    """

    weights: tuple[float, ...]

    @override
    def sizes(self, num_samples: int, num_parts: int) -> list[int]:
        exact = [Fraction(weight) for weight in self.weights]
        total = sum(exact)
        quotas = [num_samples * weight / total for weight in exact]
        sizes = [math.floor(quota) for quota in quotas]
        by_remainder = sorted(range(num_parts), key=lambda part: sizes[part] - quotas[part])
        for part in by_remainder[: num_samples - sum(sizes)]:
            sizes[part] += 1
        return sizes

    @override
    def verify(self, num_parts: int, strategy: str) -> None:
        given = f"(weights={list(self.weights)})"
        if len(self.weights) != num_parts:
            raise ConfigError(
                f"{strategy}: weights has {len(self.weights)} entries for {num_parts} devices {given}. "
                "Give one weight per device."
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or not any(self.weights):
            raise ConfigError(f"{strategy}: weights must be finite, >= 0, and not all zero {given}.")


def without_single_samples(sizes: Sequence[int]) -> list[int]:
    """Give the sample of each part of one to the smallest other that has some, for layers that need two (BatchNorm)."""
    merged = list(sizes)
    for part, size in enumerate(sizes):
        others = [other for other in range(len(merged)) if other != part and merged[other] > 0]
        if merged[part] == size == 1 and others:
            smallest = min(others, key=lambda other: merged[other])
            merged[part], merged[smallest] = 0, merged[smallest] + 1
    return merged
