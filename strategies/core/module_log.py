"""Direct what a LightningModule logs: to whoever stores it, or to a step that combines the values of several parts.

    self.log(...) → ModuleLog → receiver   a step on replicas or micro-batches: records, logs once for the whole batch
                                           an evaluation's stand-in for samples: nobody
                              → keep       nobody is set: the module's own `log`, or the trainer's faster one

It is set on a module once per run. A step only names a receiver, so nothing of the module is replaced while it runs.
"""

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import pytorch_lightning as pl
from torch import nn
from typing_extensions import override

from .patching import Replacement, replaced

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
    with ExitStack() as stack:
        for log, receiver in receivers:
            stack.enter_context(replaced(log, "receiver", receiver))
        yield


def restore_logs(module: nn.Module) -> None:
    """Give a module, and those in it, their own `log` again."""
    for part in lightning_modules(module):
        own = vars(part).get("log")
        if isinstance(own, ModuleLog):
            own.remove()


def log_nothing(*_: Any, **__: Any) -> None:
    """Take what nobody stores."""
