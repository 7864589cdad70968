"""Combine the numbers that a step appends to lists of the module, once for each part of its batch.

All parts append to the same lists, in their order: one value per part instead of one per batch. Rows per sample are
right as they are, since `torch.cat` puts them together again. A single floating-point number is not: a mean over the
list would weigh every part alike, and whether the number is a mean or a sum can't be known.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..core.errors import ConfigError
from .losses import is_fraction

_Collection: TypeAlias = list[Any] | deque[Any]
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass
class CollectedLists:
    """Combines what the chunks of one step append, by the option `batch_dims`.

    Args:
        root: the module whose attributes are looked at.
        options: for `<step>.<name of the list>` one of `mean`, `sum` (one value per batch) or `list` (one per chunk).
        strategy: name that begins messages.
    """

    root: nn.Module
    options: Mapping[str, str]
    strategy: str
    _lengths: dict[str, tuple[_Collection, int]] = field(
        default_factory=dict[str, "tuple[_Collection, int]"], init=False
    )

    def before_step(self) -> None:
        """Note how long the lists are."""
        values = self.root.__dict__.items()
        self._lengths = {key: (value, len(value)) for key, value in values if type(value) in (list, deque)}

    def after_step(self, step: str, sizes: Sequence[int]) -> None:
        """Combine what a step appended, or refuse numbers of which nothing is declared."""
        if len(sizes) == 1 or step not in _STEPS:
            return
        for name, (values, length) in self._lengths.items():
            new = list(values)[length:]  # none of a deque that was full, of which an earlier step has shown them
            if not any(map(is_fraction, new)) or self.root.__dict__.get(name) is not values:
                continue
            word = self.options.get(f"{step}.{name}")
            if word is None or (word in ("mean", "sum") and len(new) % len(sizes)):
                raise ConfigError(
                    f"{self.strategy}: {step} appended {len(new)} values to {type(self.root).__name__}.{name}, some "
                    f"for each of {len(sizes)} chunks of a batch, and they can be means or sums. Use self.log or a "
                    f"torchmetrics metric, or set strategy.batch_dims={{{step}.{name}: mean or sum}} to have one value "
                    "per batch, or list to have one per chunk."
                )
            if word in ("mean", "sum"):
                for _ in new:
                    values.pop()
                values.extend(_combined(new, sizes, word))


def _combined(values: list[Any], sizes: Sequence[int], word: str) -> list[Any]:
    """One value for all chunks, for each that a chunk has appended."""
    weights = [size / sum(sizes) for size in sizes] if word == "mean" else [1.0] * len(sizes)
    num = len(values) // len(sizes)
    found: list[Any] = []
    for i in range(num):
        own = values[i::num]
        device = own[0].device if isinstance(own[0], Tensor) else None
        moved = [value.to(device) if isinstance(value, Tensor) else value for value in own]
        found.append(sum(weight * value for weight, value in zip(weights, moved, strict=True)))
    return found
