"""The structures of all batches and results of a run, one per loader and kind of step."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
from pytorch_lightning.utilities.combined_loader import CombinedLoader

from .evaluation_lists import EvaluationLists
from .results import ResultStructure
from .samples import FewSamples, loaders_in
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
            loaders = loaders_in(loader)
            # of a stream that ranks read together the whole batches show more than a part of one sample
            known = getattr(loaders[0], "structure", None) if len(loaders) == 1 else None
            self._batches[key] = structure = known or BatchStructure(self.options, loaders)
            with suppress(Exception):  # samples can't be chosen, or the user's code is not made for so many
                few = FewSamples(trainer.lightning_module, trainer._active_loop, dataloader_idx, _TRIED, repeats=True)
                structure.settle(few.batch(0, _TRIED, trainer.strategy.root_device), _TRIED)
        return self._batches[key]

    def of_stream(self, loader: Any) -> BatchStructure:
        """The structure of a loader's batches before any hook has seen them."""
        return BatchStructure(self.options, loaders_in(loader))

    def of_inputs(self, name: str) -> BatchStructure:
        """The structure of the inputs of a part of the module, `(args, kwargs)`."""
        return BatchStructure(self.options, structures=((), (0,)), root=f"inputs of {name}", prefix=("submodule",))

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


def equal_parts(loop: Any) -> list[int]:
    """Sizes that stand for those of the parts of a loop's batches, if ranks are known to have equal ones of each."""
    divided = [getattr(loader, "rank_batches", None) for loader in loop._combined_loader._flattened]
    every = [None if batches is None else batches.part_sizes() for batches in divided]
    if not all(sizes is not None and all(len(set(one)) == 1 for one in sizes) for sizes in every):
        return []
    found = {one[0] for sizes in every for one in sizes or ()}
    odd, even = any(size % 2 and size > 1 for size in found), any(size % 2 == 0 for size in found)
    return [*[4] * even, *[3] * odd, *[2] * even, *[1] * (1 in found)]


def takes_others_batches(loop: Any) -> bool:
    """Whether ranks each take batches of a sampler that is not torch's, which nobody has made to be joined."""
    divided = [getattr(loader, "rank_batches", None) for loader in loop._combined_loader._flattened]
    return any(batches is not None and batches.deals_others for batches in divided)
