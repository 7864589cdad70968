"""Make batches of any size of a few samples: read by index and collated, or cut from the first batch of a stream."""

import copy
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from ..core.rng import random_state, swapped_random_state
from ..core.types import Batch, Chunk, Device


def loaders_in(loader: Any) -> list[Any]:
    """A loader, or those whose batches a `CombinedLoader` puts into one."""
    return list(loader.flattened) if isinstance(loader, CombinedLoader) else [loader]


class FewSamples:
    """Some samples of each loader of a loop, spread over its dataset; of a stream, of its first batch.

    Args:
        loop: that reads the loaders.
        loader: index of the one whose samples are taken, of loaders that are read one after the other.
        most: samples to read.
        repeats: read as many of a smaller dataset, too, some of them again.
        share: gives all ranks the first one's batches of streams that each reads by itself, if all compute them.

    Attributes:
        num: samples of each loader that were read.

    Raises:
        TypeError: samples can't be chosen; says why.
    """

    def __init__(
        self, module: pl.LightningModule, loop: Any, loader: int, most: int, repeats: bool = False,
        share: Callable[[Any], Any] = lambda found: found,
    ) -> None:  # fmt: skip
        self._module, self._loader = module, loader
        self._combined: Any = loop._combined_loader
        pairs = list[tuple[Any, Batch]]()
        for one in chosen_loaders(self._combined, loader):
            first = None if repeats else getattr(one, "first_batch", None)
            if hasattr(one, "first_batch") and not hasattr(one, "divide"):  # of each rank alone
                first = share(first)
                if first is not None and one.structure.has_shared:
                    raise TypeError("a stream that each rank reads by itself")
            if first is None and (not isinstance(one, DataLoader) or isinstance(one.dataset, IterableDataset)):
                raise TypeError("a stream")
            if first is None and one.batch_sampler is None:
                raise TypeError("a dataset of batches")
            pairs.append((one, first))
        nums = [len(one.dataset) if first is None else one.structure.num_samples(first) or 0 for one, first in pairs]
        self.num = most if repeats else min(most, *nums)
        with seeded(1):
            self._makes = [
                partial(_collated, one, _spread(one.dataset, self.num)) if first is None else _cut(one, first)
                for one, first in pairs
            ]

    def batch(self, i: int, j: int, device: Device) -> Batch:
        """The batch of the samples from i to j, as the step gets it."""
        module = self._module
        with seeded(1):
            batches = [make(i, j) for make in self._makes]
            batch = tree_unflatten(batches, self._combined._spec) if len(batches) > 1 else batches[0]
            batch = module.trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=self._loader)
            return module._apply_batch_transfer_handler(batch, device=torch.device(device), dataloader_idx=self._loader)


def chosen_loaders(combined: Any, loader: int = 0) -> list[Any]:
    """The loaders whose samples make a batch."""
    loaders = combined._flattened
    return loaders[loader : loader + 1] if combined._mode == "sequential" else loaders


def chunk(split: Callable[..., Sequence[Chunk]], whole: Batch, i: int, j: int, total: int) -> Chunk:
    """The samples from i to j of a batch; what cuts itself may leave out a chunk without samples."""
    return split(whole, [n for n in (i, j - i, total - j) if n])[bool(i)] if j - i < total else whole


def _cut(stream: Any, batch: Batch) -> Callable[[int, int], Batch]:
    total = stream.structure.num_samples(batch) or 0
    # the run's own step gets it, too, perhaps where there are no graphs
    return partial(chunk, stream.structure.split, apply_to_collection(batch, Tensor, Tensor.clone), total=total)


def _collated(loader: Any, samples: list[Any], i: int, j: int) -> Batch:
    return loader.collate_fn(copy.deepcopy(samples[i:j]))


def _spread(dataset: Any, num: int) -> list[Any]:
    last, many = len(dataset) - 1, getattr(dataset, "__getitems__", None)
    indices = [round(i * last / max(1, num - 1)) for i in range(num)]
    if last > num:  # pairs of neighbours, which may belong together, and which cuts after an even number part
        indices = [round(i // 2 * 2 * (last - 1) / num) + i % 2 for i in range(1, num + 1)]
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
