"""Choose a few samples, and the parts of them in which a step is tried."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ...core.devices import is_out_of_memory
from ...core.errors import PartsDiffer
from ...core.types import Batch
from ..run_structures import FewSamples, chunk, equal_parts
from ..structure import BatchStructure
from .module_state import Written
from .trial import Cannot, MakesBatch, Ran, Trial
from .verdict import Views

MOST_SAMPLES = 8


class Cuts:
    """Runs a trial on a few samples, whole and in parts.

    Args:
        loop: that reads the loaders.
        loader: index of the one whose samples are taken.
        structure: cuts a batch into chunks.
    """

    def __init__(self, trial: Trial, loop: Any, loader: int, structure: BatchStructure) -> None:
        self._trial, self._loop, self._loader = trial, loop, loader
        self._structure, self._most = structure, MOST_SAMPLES
        self._equal = list[int]()

    def halve(self) -> bool:
        """Go on with half as many samples; returns whether there are any."""
        self._most //= 2
        return self._most > 1

    def views(self, batch: Batch, views: Views) -> Iterator[tuple[bool, int, MakesBatch]]:
        """Yield each view: whether it is that of ranks, the samples, and what makes a batch of those from i to j.

        `batch` is the first one of the run, for loaders whose samples can't be chosen.
        """
        device, split, trial = self._trial.device, self._structure.split, self._trial
        try:
            alike = trial.together and trial.trains
            samples = FewSamples(trial.module, self._loop, self._loader, self._most, alike=alike)
        except TypeError as exc:
            num = 0 if batch is None else self._structure.num_samples(batch)
            if not num:
                raise Cannot(f"its samples can't be chosen from {exc}") from exc
            if views.ranks and not views.chunks and self._structure.has_shared:
                raise Cannot("it isn't known what a part of its batches is") from exc
            batch = move_data_to_device(batch, device)  # it may wait on the host
            # the run's own step gets it, too, perhaps where there are no graphs
            batch = apply_to_collection(batch, Tensor, Tensor.clone)
            total = min(num, self._most)
            whole = batch if total == num else split(batch, [total, num - total])[0]
            yield False, total, lambda i, j: chunk(split, whole, i, j, total)
            return
        total = samples.num
        if views.ranks:
            self._equal = equal_parts(self._loop)
            of_ranks = min(total, 6) if 3 in self._equal else total
            yield True, of_ranks, lambda i, j: samples.batch(i, j, device)
        if views.chunks:
            whole = samples.batch(0, total, device)
            yield False, total, lambda i, j: chunk(split, whole, i, j, total)

    def tried(self, total: int, piece: MakesBatch) -> "Tried":
        """Run the step on samples, whole and in parts; in equal ones if the run has no others (`drop_last=True`)."""
        trial = self._trial
        (whole,) = trial.run(piece, 0, total)
        cuts = [(0, (total + 1) // 2, total - 1, total), (0, round(total * 5 / 8), total), (*range(0, total, 2), total)]
        cuts = cuts[: 3 if total > 2 else 1]
        if trial.of_ranks and total % 2 == 0 and self._equal:
            fitting = [size for size in self._equal if total % size == 0 and size < total] or [total // 2]
            cuts = [tuple(range(0, total + 1, size)) for size in fitting]
        failed: Exception | None = None
        for i, places in enumerate(cuts[:2]):  # not all steps take one sample
            try:
                return Tried(trial, piece, whole, trial.run(piece, *dict.fromkeys(places)), cuts[i + 1 :])
            except Exception as exc:
                if isinstance(exc, (Cannot, PartsDiffer)) or is_out_of_memory(exc):
                    raise
                failed = exc
        assert failed is not None
        if trial.of_ranks:  # by which rank it runs, it fails on the whole batch too, and does so in training
            trial.run(lambda i, j: piece(0, total), 0, total, 2 * total)
        raise PartsDiffer(
            f"{trial.strategy}: {trial.step} fails on parts of a batch ({said(failed)}). Give every value of the "
            "batch one row per sample, or put it into an object that defines split(sizes)."
        ) from failed


@dataclass
class Tried:
    """A step that has run on some samples, whole and in parts.

    Args:
        piece: makes a batch of the samples from i to j.
        left: the places of further cuts.
    """

    trial: Trial
    piece: MakesBatch
    whole: Ran
    parts: list[Ran]
    left: list[tuple[int, ...]]

    @property
    def steps(self) -> list[Ran]:
        """The whole, and its parts."""
        return [self.whole, *self.parts]

    @cached_property
    def others(self) -> list[list[Ran]]:
        """The step in parts of further cuts, as far as it takes them."""
        found = list[list[Ran]]()
        for places in self.left:
            with suppress(Exception):
                found.append(self.trial.run(self.piece, *dict.fromkeys(places)))
        return found

    def again(self, given: Sequence[Written] = (), seed: int = 1) -> Ran:
        """Run the step on the whole once more, in another state of the module or with other random numbers."""
        return self.trial.run(self.piece, 0, self.whole.num, seed=seed, given=given)[0]


def said(error: Exception) -> str:
    """What an error says, in short."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
