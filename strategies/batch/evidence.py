"""What a loader shows about its batches: how it collates them, and what a batch of another size looks like."""

import copy
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import default_collate
from typing_extensions import override

from ..core.rng import random_state, swapped_random_state
from ..core.types import Batch
from .tree import Items, Path, at, children, held, rebuild, walk

LOOKS = (2, 3)
"""Sizes of the batches that are made to be looked at."""


_CANDIDATES = 8
"""Samples whose losses are compared: enough to differ in classes and rows, as few as a small batch has."""


@dataclass
class Evidence:
    """What is known of batches before one of them is cut; here nothing but the batch itself.

    Args:
        structures: paths of what is a structure for certain: what holds the arguments of a call, say.
        asks: whether a list that is as long as the batch, of which nothing else is known, is asked for by name;
            otherwise it is taken for its samples.
    """

    structures: tuple[Path, ...] = ()
    asks: bool = False

    def is_stacked(self, path: Path) -> bool:
        """Whether torch's own collate function made the value at a path."""
        return False

    def is_structure(self, path: Path) -> bool:
        """Whether the value at a path is a structure for certain."""
        return path in self.structures

    def shapes(self, path: Path) -> list[tuple[int, tuple[int, ...]]]:
        """(samples, shape of the value at a path) of batches of several sizes; empty where none is known."""
        return []

    def batch_size(self) -> int | None:
        """The samples of a full batch; None where the loader does not say."""
        return None


@dataclass
class LoaderEvidence(Evidence):
    """What a loader, or several combined ones, show about their batches.

    Samples are read, and collated, only where the batch in hand does not settle everything; random states stay as
    they are. A loader of a dataset that can't be read by index shows nothing.

    Args:
        loader: a `DataLoader`, any iterable, or a `CombinedLoader` that puts the batches of several into one.
        transform: what hooks make of a batch before the step sees it; None where there are none.
    """

    structures: tuple[Path, ...] = field(default=(), init=False)
    asks: bool = field(default=True, init=False)
    loader: Any
    transform: Callable[[Batch], Batch] | None = None
    _batches: list[tuple[int, Batch]] | None = field(default=None, repr=False)

    @override
    def is_stacked(self, path: Path) -> bool:
        loader = next((loader for prefix, loader in self.loaders() if path[: len(prefix)] == prefix), None)
        return (
            self.transform is None
            and isinstance(loader, DataLoader)
            and loader.collate_fn is default_collate
            and loader.batch_sampler is not None
        )

    @override
    def is_structure(self, path: Path) -> bool:
        return self.transform is None and any(
            len(prefix) > len(path) and prefix[: len(path)] == path for prefix, _ in self.loaders()
        )

    @override
    def shapes(self, path: Path) -> list[tuple[int, tuple[int, ...]]]:
        """See `Evidence`; the shape of a list is its length."""
        if self._batches is None:
            self._batches = list(self._look())
        found: list[tuple[int, tuple[int, ...]]] = []
        for num, batch in self._batches:
            try:
                value = at(batch, path)
                found.append((num, tuple(value.shape) if hasattr(value, "shape") else (len(value),)))
            except (KeyError, TypeError):
                return []
        return found

    @override
    def batch_size(self) -> int | None:
        sizes = {getattr(loader, "batch_size", None) for _, loader in self.loaders()}
        size = sizes.pop() if len(sizes) == 1 and self.transform is None else None
        return size if isinstance(size, int) else None

    def loaders(self) -> list[tuple[Path, Any]]:
        """Where in a batch each loader's own batch stands."""
        if isinstance(self.loader, CombinedLoader):
            return [(path, value) for path, value in walk(self.loader.iterables, held) if held(value) is None]
        return [((), self.loader)]

    def _look(self) -> Iterator[tuple[int, Batch]]:
        """Make a batch of each size, without a trace."""
        # arbitrary code of datasets and collate functions: a dataset that only works in a worker shows nothing
        try:
            with torch.random.fork_rng(), swapped_random_state(random_state()), torch.no_grad():
                yield from [(num, self._made(num)) for num in LOOKS]
        except Exception:  # noqa: BLE001  # see above
            return

    def _made(self, num: int) -> Batch:
        batch = self._joined([fetch(loader, num) for _, loader in self.loaders()])
        return batch if self.transform is None else self.transform(batch)

    def replaced(self, seed: int) -> tuple[int, Batch, Batch]:
        """Make a batch of some samples, and one with the first of them in place of the last, without a trace.

        Args:
            seed: of what the collate functions and the hooks draw.

        Returns:
            The number of samples, and the two batches.

        Raises:
            TypeError: a loader's samples can't be chosen.
        """
        loaders = [loader for _, loader in self.loaders()]
        num = min(_CANDIDATES, *(len(loader.dataset) for loader in loaders))
        with seeded(0):
            samples = [_samples(loader, num) for loader in loaders]
        batches = list[Batch]()
        for chosen in (samples, [[*some[:-1], some[0]] for some in samples]):
            with seeded(seed):
                parts = zip(loaders, copy.deepcopy(chosen), strict=True)
                batch = self._joined([loader.collate_fn(some) for loader, some in parts])
                batches.append(batch if self.transform is None else self.transform(batch))
        return num, batches[0], batches[1]

    def _joined(self, batches: list[Batch]) -> Batch:
        """The batch of all loaders, of their own batches."""
        if not isinstance(self.loader, CombinedLoader):
            return batches[0]
        paths = [path for path, _ in self.loaders()]
        return _filled(self.loader.iterables, (), dict(zip(paths, batches, strict=True)))


def fetch(loader: Any, num: int) -> Batch:
    """Make a batch of samples from all over a loader's dataset.

    Raises:
        TypeError: the loader's samples can't be chosen.
    """
    if isinstance(loader, DataLoader) and loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.collate_fn(loader.dataset[_spread(loader, num)])
    return loader.collate_fn(_samples(loader, num))


def fetch_singles(loader: Any, seed: int) -> list[Batch]:
    """Make a batch of each of some samples from all over a loader's dataset, and one of all, without a trace.

    Args:
        loader: whose samples are looked at.
        seed: of what the dataset and the collate function draw.

    Raises:
        TypeError: the loader's samples can't be chosen.
    """
    with seeded(seed):
        samples = _samples(loader, min(_CANDIDATES, len(loader.dataset)))
        return [loader.collate_fn(copy.deepcopy(some)) for some in (*([sample] for sample in samples), samples)]


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Draw random numbers of a seed inside the block, without gradients, and leave all generators as they were."""
    with torch.random.fork_rng(), swapped_random_state(random_state()), torch.no_grad():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def _samples(loader: Any, num: int) -> list[Any]:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise TypeError(f"a loader of type {type(loader).__name__} yields what it likes")
    if loader.batch_sampler is None:
        raise TypeError("the dataset holds ready batches")
    dataset: Any = loader.dataset
    many, indices = getattr(dataset, "__getitems__", None), _spread(loader, num)
    return [dataset[i] for i in indices] if many is None else many(indices)


def _spread(loader: Any, num: int) -> list[int]:
    """Indices of samples from all over a loader's dataset."""
    last = len(loader.dataset) - 1
    return [round(i * last / (num - 1)) for i in range(num)]


def numbers_of_rows(value: Any) -> list[int]:
    """The rows of all tensors in a batch."""
    return [len(part) for part in tensors_in(value) if part.dim()]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a batch, those that objects such as graphs hold included."""
    return [part for _, part in walk(value, _in_objects) if isinstance(part, Tensor)]


def _in_objects(value: Any) -> Items | None:
    """The parts of a structure, or the attributes of an object such as a graph."""
    if isinstance(value, (Tensor, PackedSequence)):  # of which rows are steps of time
        return None
    parts = children(value)
    return list(getattr(value, "__dict__", {}).items()) if parts is None and hasattr(value, "to") else parts


def _filled(value: Any, path: Path, made: dict[Path, Any]) -> Any:
    if path in made:
        return made[path]
    return rebuild(value, [_filled(child, (*path, key), made) for key, child in children(value) or []])
