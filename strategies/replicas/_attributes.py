"""Watch what steps do to attributes of the module: those that are lost, and lists that collect values for an epoch.

All replicas append to the root's lists, in the order of their chunks: one value per chunk instead of one per batch.
Rows per sample are right as they are, since `torch.cat` puts them together again. A single floating-point number is
not: a mean over the list would weigh every chunk alike, and whether the number is a mean or a sum can't be known.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from ..batch.losses import is_fraction
from ..core.errors import ConfigError
from .replicas import Replicas

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass
class AttributeWatch:
    """Warns, once per name, about an attribute assigned on a replica, where nothing reads it.

    The module itself is watched in every step, its submodules in the first step of each kind.
    """

    replicas: Replicas
    strategy: str
    _kinds: set[str] = field(default_factory=set[str], init=False)
    _warned: set[tuple[str, str]] = field(default_factory=set["tuple[str, str]"], init=False)

    @contextmanager
    def watching(self, kind: str) -> Generator[None]:
        """Watch one step of a kind (`training_step` for example)."""
        most = None if kind not in self._kinds else 1
        modules = [module for watched in self.replicas.modules()[1:] for module in watched[:most]]
        before = [tuple(module.__dict__.values()) for module in modules]
        yield
        self._kinds.add(kind)
        for module, values in zip(modules, before, strict=True):
            if not _are_same(values, tuple(module.__dict__.values())):
                self._warn(module, values, kind)

    def _warn(self, module: nn.Module, before: tuple[Any, ...], kind: str) -> None:
        old = list(before) + [None] * (len(module.__dict__) - len(before))
        for (name, value), previous in zip(module.__dict__.items(), old, strict=False):
            key = (type(module).__name__, name)
            if value is not previous and not _are_same((value,), (previous,)) and key not in self._warned:
                self._warned.add(key)
                rank_zero_warn(
                    f"{self.strategy}: {key[0]}.{name} was assigned on a replica in {kind} and is lost: only "
                    "the first device's value is kept. Use self.log, a torchmetrics metric, or return it from the step."
                )


def _are_same(values: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects, or equal ones of simple types.

    Two tensors are never compared by value: to read the result would wait for the device.
    """
    return len(values) == len(others) and all(map(_is_same, values, others))


def _is_same(value: Any, other: Any) -> bool:
    if value is other or type(value) is not type(other) or isinstance(value, Tensor):
        return value is other
    if isinstance(value, (list, tuple)):
        return _are_same(tuple(value), tuple(other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(item, other[key]) for key, item in value.items())
    try:
        return bool(value == other)
    except (RuntimeError, ValueError):
        return False  # arrays have no single truth value


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
    _lengths: dict[str, tuple[list[Any], int]] = field(default_factory=dict[str, "tuple[list[Any], int]"], init=False)

    def before_step(self) -> None:
        """Note how long the lists are."""
        values = self.root.__dict__.items()
        self._lengths = {key: (value, len(value)) for key, value in values if type(value) is list}

    def after_step(self, step: str, sizes: Sequence[int]) -> None:
        """Combine what a step appended, or refuse numbers of which nothing is declared."""
        if len(sizes) == 1 or step not in _STEPS:
            return
        for name, (values, length) in self._lengths.items():
            new = values[length:]
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
                values[length:] = _combined(new, sizes, word)


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
