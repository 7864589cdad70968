"""Have each micro-batch begin with the state of the module with which its step began.

What a step does to the module is done once per micro-batch: a counter would count micro-batches, and spectral norm
would improve its estimate several times. So what the first micro-batch changes is put back before each other one, and
what it has left stays. If others leave something else, `batch/checks/state_watch.py` refuses it. What was not there
before, was None, or says whether something was done (a hook registered, a table computed) is done once, and stays.
what it has left stays. If others leave something else, `batch/state_watch.py` refuses it. What was not there before,
was None, or says whether something was done (a hook registered, a table computed) is done once, and stays. Hooks that
each micro-batch registers are refused: they would be called several times.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..batch.checks.state_watch import own_parts
from ..core.errors import ConfigError
from ..core.module_checks import is_plain
from ..core.patching import hooks_of

_LIGHTNING = LightningModule().__dict__.keys()


class CarriedState:
    """Buffers and plain attributes that a step changes, as far as the first step of a run shows.

    Args:
        module: the placed module; metrics and BatchNorm layers in it are left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners = [owner for _, part in own_parts(module) for owner in (vars(part), part._buffers)]
        self._changed: list[tuple[dict[str, Any], str]] | None = None
        """What a step changes, as a dictionary and a key in it; None before the first step."""
        self._before: list[Any] = []
        self._left: list[Any] = []
        self._next_hook: float = math.inf
        """The lowest number of a hook that a micro-batch after the first can have registered."""

    @contextmanager
    def microbatch(self, number: int) -> Generator[None]:
        """Run a micro-batch of a step inside the block, in their order."""
        if number == 1:
            self._next_hook = RemovableHandle.next_id
        if number:
            self._put([_copy(value) for value in self._before])
            yield
            self._verify_hooks()
            return
        if self._changed is not None:
            self._before = [_copy(owner.get(key)) for owner, key in self._changed]
            yield
        else:
            before, copies = [dict(owner) for owner in self._owners], [_copies(owner) for owner in self._owners]
            yield
            self._find_changed(before, copies)
        self._left = [owner.get(key) for owner, key in self._changed or ()]

    @contextmanager
    def step(self) -> Generator[None]:
        """Run the micro-batches of a step inside the block; what the first one has left stays."""
        self._next_hook = math.inf
        try:
            yield
        finally:
            self._put(self._left)
            self._before, self._left = [], []
        self._verify_hooks()  # again: those of parameters are not there while gradients are summed

    def _verify_hooks(self) -> None:
        """Refuse hooks that a micro-batch after the first has registered."""
        if RemovableHandle.next_id <= self._next_hook:
            return
        for name, owner in (*self._module.named_modules(), *self._module.named_parameters()):
            numbers = (number for hooks in hooks_of(owner) for number in hooks if isinstance(number, int))
            if any(number >= self._next_hook for number in numbers):
                raise ConfigError(
                    f"training_step registers a hook on {name or type(owner).__name__} in every micro-batch, and they "
                    "would all be called. Register it in __init__, setup, on_fit_start or on_train_batch_start, or "
                    "remove it in the step."
                )

    def _find_changed(self, before: list[dict[str, Any]], copies: list[dict[str, Any]]) -> None:
        self._changed, self._before = [], []
        for owner, old, copied in zip(self._owners, before, copies, strict=True):
            for key in (old.keys() & owner.keys()) - _LIGHTNING:
                was, now = old[key], owner[key]
                if _is_kept(was) and _is_kept(now) and (was is not now or _is_written(now, copied.get(key))):
                    self._changed.append((owner, key))
                    self._before.append(copied.get(key, was))

    def _put(self, values: list[Any]) -> None:
        for (owner, key), value in zip(self._changed or (), values, strict=False):
            owner[key] = value


def _copies(owner: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in owner.items() if isinstance(value, Tensor)}


def _copy(value: Any) -> Any:
    """A copy of a tensor that may be written to in place."""
    if isinstance(value, Tensor) and is_plain(value) and not value.requires_grad:
        return value.detach().clone()
    return value


def _is_written(tensor: Any, copied: Any) -> bool:
    return isinstance(tensor, Tensor) and copied is not tensor and not torch.equal(tensor, copied)


def _is_kept(value: Any) -> bool:
    """Whether a value is a tensor, or can't be written to by those who hold it and is more than yes, no or nothing."""
    if isinstance(value, bool):
        return False
    if isinstance(value, tuple):
        return all(map(_is_kept, value))
    return isinstance(value, (str, bytes, Number, Tensor, torch.device, torch.dtype))
