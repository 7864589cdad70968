"""Wrap loaders, and read a DataLoader's batches without the record that its iterator makes for torch's profiler."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core.types import Batch

_NEXT = _BaseDataLoaderIter.__next__


class Around:
    """A loader around another one, whose attributes it has."""

    loader: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def evener_original(self) -> Any:
        """The user's loader, where this one is given to a trainer once more; see `RankLoaders`."""
        return getattr(self.loader, "evener_original", self.loader)

    @property
    def _iterator(self) -> Any:
        """The iterator on which Lightning shuts down a DataLoader's workers."""
        return self.loader._iterator  # AttributeError if it has none

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator


def next_of(iterator: Iterator[Any]) -> Callable[[], Batch]:
    """Return what does what `next(iterator)` does.

    A DataLoader's is read past the wrapper of its `__next__`, unless that is patched, a profiler runs, or the length of
    its dataset is unknown, so that torch counts what it yields.
    """
    own: Any = iterator
    recorded: Callable[[], Batch] = own.__next__
    if type(own).__next__ is not _NEXT or own._dataset_kind == _DatasetKind.Iterable:
        return recorded

    def fetch() -> Batch:
        if own._sampler_iter is None or torch.autograd._profiler_enabled():
            return recorded()
        batch = own._next_data()
        own._num_yielded += 1
        return batch

    return fetch
