"""Warn about attributes that are assigned on a replica and so get lost."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn

from .replicas import Replicas, are_same, attribute_values


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
        before = [attribute_values(module) for module in modules]
        yield
        self._kinds.add(kind)
        for module, values in zip(modules, before, strict=True):
            if not are_same(values, attribute_values(module)):
                self._warn(module, values, kind)

    def _warn(self, module: nn.Module, before: tuple[Any, ...], kind: str) -> None:
        old = list(before) + [None] * (len(module.__dict__) - len(before))
        for (name, value), previous in zip(module.__dict__.items(), old, strict=False):
            key = (type(module).__name__, name)
            if value is not previous and not are_same((value,), (previous,)) and key not in self._warned:
                self._warned.add(key)
                rank_zero_warn(
                    f"{self.strategy}: {key[0]}.{name} was assigned on a replica in {kind} and is lost: only "
                    "the first device's value is kept. Use self.log, a torchmetrics metric, or return it from the step."
                )
