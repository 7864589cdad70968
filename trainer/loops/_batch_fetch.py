"""Fetch a batch and move it to the device, in the common case at the cost of a hand-written loop."""

from collections.abc import Callable
from typing import Any, cast

import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.loops import fetchers
from pytorch_lightning.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from pytorch_lightning.utilities.combined_loader import CombinedLoader, _MaxSizeCycle, _Sequential
from torch import Tensor

from ...strategies.core.loop_contract import NothingToDo
from ...strategies.core.side_streams import from_host
from ...strategies.core.types import Batch
from ..checkpoint import next_of
from .hook_plan import DATA_MODULE, MODULE, PRECISION, HookPlan, any_overridden, may_be_lean, overridden


def may_read_lean(trainer: Any, fetcher: Any) -> bool:
    """Whether steps on a fetcher's batches may be lean; it then records nothing for the profiler."""
    is_lean = may_be_lean(trainer)
    if is_lean:
        fetcher._start_profiler = fetcher._stop_profiler = fetchers._profile_nothing
    return is_lean and not isinstance(fetcher, _DataLoaderIterDataFetcher)


_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class OneLoader:
    """Iterate over a single sized loader without Lightning's machinery for combined loaders.

    The counters of Lightning's fetcher are kept up to date, so its own code can take over at any time.

    Args:
        fetcher: Lightning's fetcher, its iterator already created.
    """

    def __init__(self, fetcher: _DataFetcher) -> None:
        self.fetcher = fetcher
        self.combined: Any = fetcher.combined_loader._iterator
        self._iterator: Any = None
        self._next: Callable[[], Batch] = self.__next__

    @classmethod
    def of(cls, fetcher: _DataFetcher) -> "OneLoader | None":
        """That of a fetcher; None unless it reads one loader of known length."""
        combined: Any = fetcher._combined_loader
        fits = (
            type(fetcher) is _PrefetchDataFetcher
            and fetcher.length is not None
            and type(combined) is CombinedLoader
            and type(iterator := cast(Any, combined._iterator)) in (_MaxSizeCycle, _Sequential)
            and len(iterator.iterables) == len(iterator.iterators) == 1
            and combined._spec.num_nodes == 1
        )
        return cls(fetcher) if fits else None

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: the loader is exhausted.
        """
        combined, fetcher = self.combined, self.fetcher
        iterator = combined.iterators[0]
        if iterator is not self._iterator:
            self._iterator, self._next = iterator, next_of(iterator)
        try:
            batch = self._next()
        except StopIteration:
            if type(combined) is _MaxSizeCycle:
                combined._consumed[0] = True
            fetcher.done = True
            raise
        combined._idx += 1  # for the batch that was read past it
        fetcher.fetched += 1
        assert fetcher.length is not None
        fetcher.done = fetcher.fetched >= fetcher.length
        return batch


def batch_mover(plan: HookPlan) -> Callable[[Batch, int], Batch]:
    """Choose how a batch is moved to the device: a function of (batch, dataloader_idx)."""
    module, data = plan.module, plan.trainer.datamodule
    names = (*_TRANSFER_HOOKS, *("_on_before_batch_transfer", "_apply_batch_transfer_handler", "_call_batch_hook"))
    plain = (
        plan.keeps_contract("batch_to_device")
        and not any_overridden(module, names, MODULE)
        and (data is None or not any_overridden(data, _TRANSFER_HOOKS, DATA_MODULE))
        and not overridden(plan.precision, "convert_input", PRECISION)
    )
    if not plain:

        def convert_and_move(batch: Batch, dataloader_idx: int) -> Batch:
            batch = plan.precision.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
            return plan.call_as("batch_to_device", plan.strategy.batch_to_device, batch, dataloader_idx=dataloader_idx)

        return convert_and_move
    contract = plan.contract
    device = contract.meeting_device or plan.strategy.root_device
    move: Callable[[Batch, int], Batch] = to_cpu if device.type == "cpu" else lambda batch, _: from_host(batch, device)
    if isinstance(contract, NothingToDo):
        return move

    def begin_and_move(batch: Batch, dataloader_idx: int) -> Batch:
        contract.begin_batch(dataloader_idx)
        return move(batch, dataloader_idx)

    return begin_and_move


def to_cpu(batch: Batch, dataloader_idx: int = 0) -> Batch:
    """Move a batch, or predictions, to the CPU."""
    kind = type(batch)
    if kind is Tensor and batch.is_cpu:
        return batch
    if kind is list or kind is tuple:
        for item in batch:
            if type(item) is not Tensor or not item.is_cpu:
                break
        else:
            return kind(batch)
    return move_data_to_device(batch, torch.device("cpu"))
