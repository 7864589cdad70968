"""Read a DataLoader's batches without the record that its iterator makes for torch's profiler at every batch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ..core.types import Batch

_NEXT = _BaseDataLoaderIter.__next__


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
