"""Warn of what the first step of a kind assigns to attributes of replicas, where it is lost."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from .replicas import Replicas


@contextmanager
def warning_of_lost_attributes(replicas: Replicas, strategy: str, step: str) -> Generator[None]:
    """Warn, once per name, of attributes that other replicas than the root get inside the block.

    Args:
        strategy: name that begins messages.
        step: the method that runs, `training_step` for example.
    """
    modules = [module for replica in replicas.modules()[1:] for module in replica]
    before = [dict(vars(module)) for module in modules]
    yield
    found = {
        (type(module).__name__, name)
        for module, held in zip(modules, before, strict=True)
        for name, value in vars(module).items()
        # lists of evaluation steps are joined
        if not _is_same(value, held.get(name)) and not (isinstance(value, list) and step != "training_step")
    }
    for owner, name in sorted(found):
        rank_zero_warn(
            f"{strategy}: {owner}.{name} was assigned on a replica in {step} and is lost: only the first device's "
            "value is kept. Use self.log, a torchmetrics metric, or return it from the step."
        )


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are one object, or equal ones of a simple type: comparing tensors would wait for a device."""
    if value is other or type(value) is not type(other) or isinstance(value, Tensor):
        return value is other
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_is_same, value, other))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # of anything
    return bool(value == other) if isinstance(value, (str, bytes, int, float, complex)) else False
