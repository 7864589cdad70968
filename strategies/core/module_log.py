"""Direct what a LightningModule logs: to whoever stores it, or to a step that combines the values of several parts.

    self.log(...) → ModuleLog → receiver   a step on replicas or micro-batches: records, logs once for the whole batch
                                           a rank without samples: `without_weight`, or nobody
                              → keep       nobody is set: the module's own `log`, or the trainer's faster one

It is set on a module once per run. A step only names a receiver, so nothing of the module is replaced while it runs.
"""

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from .patching import Replacement, replaced

LOG_OPTIONS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]
"""The arguments of `log` after the module, name and value, in order."""

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}

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

    def without_weight(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Store that a value was logged, without changing anything: for a rank that has no samples of a batch.

        Means get weight 0, sums 0, maxima -inf, minima +inf.
        """
        options.update(zip(LOG_OPTIONS, args, strict=False))
        self.keep(name, _neutral(value, options.get("reduce_fx", "mean")), **{**options, "batch_size": 0})


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


def _neutral(value: Any, reduce_fx: Any) -> Any:
    """A value that leaves the epoch's as it is; of the same dtype, by which ranks exchange them."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    number = _NEUTRAL.get(kind, 0.0)
    if isinstance(value, Tensor):
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        return torch.full_like(value.detach(), number, dtype=dtype)
    return number if isinstance(value, (int, float)) else value
