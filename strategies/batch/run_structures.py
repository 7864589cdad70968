"""The structures of all batches and results of a run, one per loader and kind of step."""

import copy
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from ..core.rng import isolated
from ..core.types import Batch, Chunk, Device
from .evaluation_lists import EvaluationLists
from .results import ResultStructure
from .structure import BatchStructure

_TRIED = 7
"""Samples that show what is as long as they are."""


class RunStructures:
    """Decisions about batches, kept for a run.

    Args:
        options: what `verify_batch_dims` returned.
        lists: joins what evaluation steps append.
    """

    def __init__(self, options: Mapping[str, str] | None = None, lists: EvaluationLists | None = None) -> None:
        self.options = dict(options or {})
        self.lists = lists or EvaluationLists()
        self._batches: dict[tuple[str, int], BatchStructure] = {}
        self._results: dict[tuple[str, int], ResultStructure] = {}

    def of_batch(self, trainer: pl.Trainer, dataloader_idx: int = 0) -> BatchStructure:
        """The structure of the batch in hand."""
        key = (_stage(trainer), dataloader_idx)
        if key not in self._batches:
            loader: Any = getattr(trainer._active_loop, "_combined_loader", None)
            if isinstance(loader, CombinedLoader) and loader._mode == "sequential":
                loader = loader.flattened[dataloader_idx]
            # of a stream that ranks read together the whole batches show more than a part of one sample
            known = None if isinstance(loader, CombinedLoader) else getattr(loader, "structure", None)
            self._batches[key] = structure = known or self.of_stream(loader)
            with suppress(Exception):  # samples can't be chosen, or the user's code is not made for so many
                few = FewSamples(trainer.lightning_module, trainer._active_loop, dataloader_idx, _TRIED, repeats=True)
                structure.settle(few.batch(0, _TRIED, trainer.strategy.root_device), _TRIED)
        return self._batches[key]

    def of_stream(self, loader: Any) -> BatchStructure:
        """The structure of a loader's batches before any hook has seen them."""
        loaders = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
        sizes = {getattr(one, "batch_size", None) for one in loaders}
        return BatchStructure(self.options, sizes.pop() if len(sizes) == 1 else None)

    def of_inputs(self, name: str) -> BatchStructure:
        """The structure of the inputs of a part of the module, by their numbers and names."""
        return BatchStructure(self.options, root=f"inputs of {name}", prefix=("submodule",))

    def of_results(self, step: str, dataloader_idx: int = 0) -> ResultStructure:
        """The structure of what a step returns; errors call it by the step's name."""
        key = (step, dataloader_idx)
        if key not in self._results:
            self._results[key] = ResultStructure(step, self.options)
        return self._results[key]


def batch_structure(trainer: pl.Trainer, dataloader_idx: int = 0) -> BatchStructure:
    """The structure of the batch in hand: the strategy's, where it cuts batches, else of the training in hand."""
    known: RunStructures | None = getattr(trainer.strategy, "structures", None)
    if known is None:
        combined = getattr(trainer._active_loop, "_combined_loader", None)
        known = RunStructures() if combined is None else _WITHOUT_STRATEGY.setdefault(combined, RunStructures())
    return known.of_batch(trainer, dataloader_idx)


def dataloader_index(trainer: pl.Trainer, rest: tuple[Any, ...]) -> int:
    """Which loader an evaluated batch is from: the last argument of a step, where there are several loaders."""
    return rest[-1] if rest and not trainer.training and num_evaluated(trainer._active_loop) > 1 else 0


def num_evaluated(loop: Any) -> int:
    """How many loaders a loop of evaluation reads one after the other; those that are read side by side are one."""
    return loop.num_dataloaders if loop is not None and loop._combined_loader._mode == "sequential" else 1


_WITHOUT_STRATEGY: WeakKeyDictionary[CombinedLoader, RunStructures] = WeakKeyDictionary()


def _stage(trainer: pl.Trainer) -> str:
    if trainer.sanity_checking or trainer.validating:
        return "validate"
    return "train" if trainer.training else "test" if trainer.testing else "predict"


def takes_others_batches(loop: Any) -> bool:
    """Whether ranks each take batches of a sampler that is not torch's, which nobody has made to be joined."""
    divided = [getattr(loader, "rank_batches", None) for loader in loop._combined_loader._flattened]
    return any(batches is not None and batches.deals_others for batches in divided)


class FewSamples:
    """Some samples of each loader of a loop, spread over its dataset; of a stream, of its first batch.

    Args:
        loop: that reads the loaders.
        loader: index of the one whose samples are taken, of loaders that are read one after the other.
        most: samples to read.
        repeats: read as many of a smaller dataset, too, some of them again.
        alike: refuse streams that each rank reads by itself, since all compute the same samples.

    Attributes:
        num: samples of each loader that were read.

    Raises:
        TypeError: samples can't be chosen; says why.
    """

    def __init__(
        self, module: pl.LightningModule, loop: Any, loader: int, most: int, repeats: bool = False, alike: bool = False
    ) -> None:
        self._module, self._loader = module, loader
        self._combined: Any = loop._combined_loader
        pairs = list[tuple[Any, Batch]]()
        for one in chosen_loaders(self._combined, loader):
            first = None if repeats else getattr(one, "first_batch", None)
            if hasattr(one, "first_batch") and not hasattr(one, "divide"):  # of each rank alone
                first = None if alike else first
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
    with torch.random.fork_rng(devices, device_type=kind), isolated():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
