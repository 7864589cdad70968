"""Fakes in the place of a module's tensors and of a loader's batches: shapes without values."""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics import Metric

from ...strategies import ConfigError
from ...strategies.core.types import Batch


class Repeated:
    """The first batch of a loader, as often as it is asked for.

    Args:
        loader: the loader; it is read once.
    """

    def __init__(self, loader: Any) -> None:
        self.batch = next(iter(loader), None)
        if self.batch is None:
            raise ConfigError("mode=plan: the training loader has no batch. Give it at least one.")
        try:
            self._length = max(len(loader), 1000)  # a learning-rate schedule may ask for the length of an epoch
        except TypeError:
            self._length = 1000

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.batch


def make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Put a fake in the place of every parameter and buffer; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            tensors: dict[str, Any] = store
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fakes.setdefault(id(tensor), mode.from_tensor(tensor))


def silence(module: pl.LightningModule) -> None:
    """Have `self.log` and metrics do nothing: they look at values, and hold next to no memory."""
    vars(module)["log"] = _nothing
    for part in module.modules():
        if isinstance(part, Metric):
            vars(part).update(forward=_zero, update=_nothing)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a function that has no effect on memory."""


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())


def resized(batch: Batch, num: int, samples: int, mode: FakeTensorMode) -> Batch:
    """A batch of another size: new fakes, with `samples` rows where the batch has `num`.

    Args:
        batch: nested fake tensors.
        num: its samples.
        samples: how many are asked for.
        mode: makes the fakes.
    """

    def resize(tensor: Tensor) -> Tensor:
        rows = samples if tensor.dim() and tensor.shape[0] == num else None
        shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        with mode:
            return torch.empty(shape, dtype=tensor.dtype)

    return apply_to_collection(batch, Tensor, resize, allow_frozen=True)
