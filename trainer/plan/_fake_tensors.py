"""Replace a module's tensors and a loader's batches with fake tensors, which have shapes but no values."""

from operator import length_hint
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...strategies import ConfigError
from ...strategies.core.types import Batch


def repeated(loader: Any) -> list[Batch]:
    """The first batch of a loader, as many times as the loader has batches, and at least 1000 times."""
    batch = next(iter(loader), None)
    if batch is None:
        raise ConfigError("mode=plan: the training loader is empty. Give it at least one batch.")
    return [batch] * max(length_hint(loader), 1000)  # a learning rate schedule may use the length of an epoch


def make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer with a fake tensor; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            tensors: dict[str, Any] = store
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fakes.setdefault(id(tensor), mode.from_tensor(tensor))


def resized(batch: Batch, num: int, samples: int, mode: FakeTensorMode) -> Batch:
    """Create a batch of another size: new fake tensors, with `samples` rows where the batch has `num`."""

    def resize(tensor: Tensor) -> Tensor:
        rows = samples if tensor.dim() and tensor.shape[0] == num else None
        shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        with mode:
            return torch.empty(shape, dtype=tensor.dtype)

    return apply_to_collection(batch, Tensor, resize, allow_frozen=True)
