"""Replace a method of one object for a run, or an attribute, hooks or lines of a log inside a block."""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

HOOKS = tuple(key for key, value in nn.Module().__dict__.items() if "hooks" in key and isinstance(value, dict))
"""The attributes in which a module keeps its hooks, each a dictionary from number to hook."""


class Replacement:
    """Takes the place of a method of one object, until `remove`; copies of the object have their own method.

    Args:
        call: called instead, with the object's own method and the arguments.
    """

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        self.owner, self.name, self.call = owner, name, call
        self._kept = vars(owner).get(name)
        self.own: Callable[..., Any] = getattr(owner, name) if self._kept is None else self._kept
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands for the method."""
        return self.call(self.own, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied or pickled with its object, it becomes the copy's own method."""
        return getattr, (self.owner, self.name)

    def remove(self) -> None:
        """Restore the object's own method, unless another has taken this one's place."""
        if vars(self.owner).get(self.name) is self:
            del vars(self.owner)[self.name]
            vars(self.owner).update({} if self._kept is None else {self.name: self._kept})


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Generator[None]:
    """Set an attribute on an object, or a class, inside the block, and restore the previous one afterwards."""
    kept = [vars(owner)[name]] if name in vars(owner) else []
    put: Callable[[str, Any], None] = partial(setattr, owner) if isinstance(owner, type) else vars(owner).__setitem__
    put(name, value)
    try:
        yield
    finally:
        if kept:
            put(name, kept[0])
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            del vars(owner)[name]


def hooks_of(owner: nn.Module | Tensor) -> list[dict[Any, Any]]:
    """The dictionaries of the hooks of a module, or of a parameter: of its gradient, and of what is accumulated."""
    if isinstance(owner, nn.Module):
        return [vars(owner)[key] for key in HOOKS if key in vars(owner)]  # a scripted one has others
    found = [owner._backward_hooks, owner._post_accumulate_grad_hooks]
    return [{} if hooks is None else hooks for hooks in found]


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Generator[None]:
    """Disable the parameters' hooks inside the block: those that get a gradient, and those that follow it."""
    found = [(hooks, dict(hooks)) for parameter in parameters for hooks in hooks_of(parameter) if hooks]
    for hooks, _ in found:
        hooks.clear()  # torch keeps these dicts: to set None instead has no effect
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)


@contextmanager
def filtered(loggers: Iterable[str], keeps: Callable[[logging.LogRecord], bool]) -> Generator[None]:
    """Log only the records that a function keeps, inside the block."""
    found = [logging.getLogger(name) for name in loggers]
    for logger in found:
        logger.addFilter(keeps)
    try:
        yield
    finally:
        for logger in found:
            logger.removeFilter(keeps)


LIGHTNING_TELLS = ("pytorch_lightning.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero")
"""The loggers of `rank_zero_info` and `rank_zero_warn`, under both names of Lightning."""
