"""Read a few samples by index, and collate them to batches of any size."""

import copy
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from ..core.rng import random_state, swapped_random_state
from ..core.types import Batch, Device


def loaders_in(loader: Any) -> list[Any]:
    """A loader, or those whose batches a `CombinedLoader` puts into one."""
    return list(loader.flattened) if isinstance(loader, CombinedLoader) else [loader]


class FewSamples:
    """Some samples of each loader of a loop, spread over its dataset.

    Args:
        loop: that reads the loaders.
        loader: index of the one whose samples are taken, of loaders that are read one after the other.
        most: samples to read.
        repeats: read as many of a smaller dataset, too, some of them again.

    Attributes:
        num: samples of each loader that were read.

    Raises:
        TypeError: samples can't be chosen; says why.
    """

    def __init__(self, module: pl.LightningModule, loop: Any, loader: int, most: int, repeats: bool = False) -> None:
        self._module, self._loader = module, loader
        self._combined: Any = loop._combined_loader
        loaders = chosen_loaders(self._combined, loader)
        self.num = most if repeats else min([most, *(len(one.dataset) for one in loaders)])
        with seeded(1):
            self._samples = [(one, _spread(one.dataset, self.num)) for one in loaders]

    def batch(self, i: int, j: int, device: Device) -> Batch:
        """The batch of the samples from i to j, as the step gets it."""
        module = self._module
        with seeded(1):
            batches = [one.collate_fn(copy.deepcopy(samples[i:j])) for one, samples in self._samples]
            batch = tree_unflatten(batches, self._combined._spec) if len(batches) > 1 else batches[0]
            batch = module.trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=self._loader)
            return module._apply_batch_transfer_handler(batch, device=torch.device(device), dataloader_idx=self._loader)


def chosen_loaders(combined: Any, loader: int = 0) -> list[Any]:
    """The loaders whose samples make a batch.

    Raises:
        TypeError: samples can't be chosen from one; says why.
    """
    loaders = combined._flattened
    if combined._mode == "sequential":
        loaders = loaders[loader : loader + 1]
    for one in loaders:
        if not isinstance(one, DataLoader) or isinstance(one.dataset, IterableDataset):
            raise TypeError("a stream")
        if one.batch_sampler is None:
            raise TypeError("a dataset of batches")
    return loaders


def _spread(dataset: Any, num: int) -> list[Any]:
    last, many = len(dataset) - 1, getattr(dataset, "__getitems__", None)
    indices = [round(i * last / (num - 1)) for i in range(num)] if num > 1 else [0]
    found = [dataset[i] for i in indices] if many is None else list(many(indices))
    if len(found) != num:
        raise TypeError("a dataset that makes batches itself")
    return found


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Generator[None]:
    """Draw random numbers of a seed inside the block, and leave all generators, and that of a device, as they were."""
    devices = [] if device is None or device.type in ("cpu", "meta") else [device]
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind), swapped_random_state(random_state()):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
