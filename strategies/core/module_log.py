"""Direct what a module logs: to whoever stores it, or to a step that combines the values of several parts."""

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from .errors import ConfigError
from .patching import Replacement

LOG_OPTIONS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]
"""The arguments of `log` after the module, name and value, in order."""

Receiver = Callable[..., None]
"""Takes the arguments of `self.log`."""


class ModuleLog(Replacement):
    """Takes the place of `self.log` of one module; a `receiver` gets all values instead."""

    receiver: Receiver | None = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "log", self.keep)

    @override
    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        (self.receiver or self.keep)(name, value, *args, **options)

    def keep(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Store a value."""
        self.own(name, value, *args, **options)


def module_log(module: pl.LightningModule) -> ModuleLog:
    """The `ModuleLog` of a module; it is set on the module if it has none."""
    own = vars(module).get("log")
    if not isinstance(own, ModuleLog):
        own = vars(module)["log"] = ModuleLog(module)
    return own


def lightning_modules(module: nn.Module) -> list[pl.LightningModule]:
    """A module and all in it that have a `log`."""
    return [part for part in module.modules() if isinstance(part, pl.LightningModule)]


@contextmanager
def received(receivers: Iterable[tuple[ModuleLog, Receiver]]) -> Generator[None]:
    """Inside the block, each log gives its values to a receiver."""
    given = [*receivers]
    before = [log.receiver for log, _ in given]
    for log, receiver in given:
        log.receiver = receiver
    try:
        yield
    finally:
        for (log, _), receiver in zip(given, before, strict=True):
            log.receiver = receiver


def restore_logs(module: nn.Module) -> None:
    """Give a module, and those in it, their own `log` again."""
    for part in lightning_modules(module):
        own = vars(part).get("log")
        if isinstance(own, ModuleLog):
            own.remove()


def log_nothing(*_: Any, **__: Any) -> None:
    """Take what nobody stores."""


class NoValueError(ConfigError):
    """The value of a part of a batch is used, but can't be computed."""


_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.detach, Tensor.clone, Tensor.__deepcopy__)
_properties: Any = Tensor
_ASKED = (
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference,
    *(getattr(_properties, name).__get__ for name in ("device", "is_meta", "requires_grad", "_version")),
)  # fmt: skip
"""What is asked of a tensor that is only moved, or kept."""


class NoValue(Tensor):
    """Stands for a value that isn't known, or not yet; it may be moved, but using it raises until it is `known`."""

    reason = ""
    error: type[ConfigError] = NoValueError
    known: Any = None

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unknown = [one for one in tree_leaves((args, kwargs)) if isinstance(one, NoValue) and one.known is None]
        if not unknown:
            args, kwargs = tree_map_only(NoValue, known, (args, kwargs or {}))
            return func(*args, **kwargs)
        if func in _MOVES:
            return args[0]
        if func in _ASKED:
            return func(torch.zeros(()))
        raise unknown[0].error(unknown[0].reason)

    def __getattr__(self, name: str) -> Any:
        if name in ("items", "keys", "get"):  # of a metric that returns several values
            raise self.error(self.reason)
        raise AttributeError(name)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"NoValue({self.reason})"


def no_value(reason: str, error: type[ConfigError] = NoValueError) -> NoValue:
    """Make a `NoValue` that raises an error with a reason."""
    value = torch.zeros(()).as_subclass(NoValue)
    value.reason, value.error = reason, error
    return value


def known(value: Any) -> Any:
    """What a `NoValue` stands for, as far as it is known."""
    return value if not isinstance(value, NoValue) or value.known is None else value.known
