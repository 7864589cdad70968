"""Watch what steps do to attributes of the module that are lost on a replica."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from .replicas import Replicas


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
