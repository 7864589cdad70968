"""Make the loader of each rank; the way to share samples depends on the loader.

loader                          per_device                       global
batches of indices              `Deal`: each rank whole batches  `Divide`: each rank a part of every batch
single keys (batch_size=None)   `Deal`, kept in step             every batch is read by all and divided
iterable dataset, any iterable  each rank its own, kept in step  every batch is read by all and divided
with a `DistributedSampler`     as it is                         refused
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch
from lightning_fabric.utilities.seed import pl_worker_init_function
from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
from torch import Tensor
from torch.distributed import Work
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ..batch.policies import Even, Policy
from ..batch.structure import BatchStructure
from ..core.errors import ConfigError
from .sampling import Agree, Deal, Divide, RankBatches
from .streams import Divided, Lockstep, Stream

LoaderRole: TypeAlias = Literal["train", "evaluate", "predict"]
BatchSizeIs: TypeAlias = Literal["per_device", "global"]
Source: TypeAlias = Stream | RankBatches


@dataclass
class RankLoaders:
    """Makes this rank's loaders from the user's; in training a policy divides global batches, evaluation does evenly.

    Args:
        sum_over_ranks: starts an in-place sum of a small CPU tensor over all ranks.
        smallest: minimum samples of a rank in training, if it has any.
        in_step: whether ranks without samples of an evaluated batch join its step with weight zero.
        joined: ranks that compute a global batch of which each reads all, as if it were the only one.
        is_whole: see `RankBatches`, of loaders of a role; as far as is known, unless it looks at the step.
    """

    strategy: str
    rank: int
    num_ranks: int
    batch_size_is: BatchSizeIs
    agree: Agree
    sum_over_ranks: Callable[[Tensor], Work]
    policy: Policy = field(default_factory=Even)
    smallest: int = 1
    structure_of: Callable[[Any], BatchStructure] = lambda loader: BatchStructure()
    in_step: bool = False
    divides: list[Divide] = field(default_factory=list)
    joined: int = 1
    is_whole: Callable[[LoaderRole, bool], bool | None] = lambda role, _: False if role == "evaluate" else None

    def process(self, loader: Any, role: LoaderRole, managed: bool = True) -> Any:
        """Make the loader of this rank's batches from the user's, who divides the samples unless that is `managed`."""
        loader = getattr(loader, "evener_original", loader)  # a `CombinedLoader` keeps those made for a rank
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return self._stream(loader, role)
        shared = _distributed_sampler(loader)
        if shared is not None and self.batch_size_is == "global":
            raise ConfigError(
                f"{self.strategy}: the loader's {type(shared).__name__} gives each rank its own batches, but "
                "batch_size_is=global divides one batch among ranks. Remove the sampler, or set "
                "batch_size_is=per_device."
            )
        if shared is not None:
            return self._seeded(loader)
        if not managed:
            return self._stream(loader, role)
        if loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler):
            return self._keyed(loader, role)
        deal = Deal(role != "predict", self.smallest if role == "train" else 1, self.joined)
        cut = self._divide(role) if self.batch_size_is == "global" else deal
        is_whole = None if role == "predict" else partial(self.is_whole, role, role == "evaluate")
        return self._cut(loader, cut, role == "train" or self.in_step, is_whole)

    def change_policy(self, policy: Policy, at: int) -> None:
        """Divide training batches by another policy, from a global batch on; see `Divide.change`."""
        for divide in self.divides:
            divide.change(policy, at)

    def regroup(self, rank: int, num_ranks: int, policy: Policy) -> None:
        """Divide what is read from now on among other ranks."""
        self.rank, self.num_ranks, self.policy = rank, num_ranks, policy
        for divide in self.divides:  # which cuts the batches of the epoch once more
            divide.policy, divide.num_cut = policy, 0
            divide.changes.clear()

    def exchange(self, *values: float) -> list[list[float]]:
        """Exchange numbers of the ranks, and of how many global batches each has cut: a row per rank."""
        table = torch.zeros(self.num_ranks, len(values) + 1, dtype=torch.float64)
        num_cut = max((divide.num_cut for divide in self.divides), default=0)
        table[self.rank] = torch.tensor([*values, num_cut])
        self.sum_over_ranks(table).wait()
        return table.tolist()

    def _divide(self, role: LoaderRole) -> Divide:
        if role != "train":
            return Divide()
        self.divides.append(Divide(self.policy, smallest=self.smallest))
        return self.divides[-1]

    def _cut(
        self, loader: DataLoader[Any], cut: Any, joins: bool, is_whole: Callable[[], bool | None] | None = None
    ) -> DataLoader[Any]:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        units = getattr(loader, name)
        tracks_indices = isinstance(units, _IndexBatchSamplerWrapper)  # Lightning's, for prediction writers
        own = units._batch_sampler if tracks_indices else units
        batches = RankBatches(own, cut, self.rank, self.num_ranks, joins, self.agree, is_whole)
        clone = self._seeded(loader)
        # DataLoader refuses such an assignment on a loader in use; this one is new
        object.__setattr__(clone, name, _IndexBatchSamplerWrapper(batches) if tracks_indices else batches)
        object.__setattr__(clone, "rank_batches", batches)
        return clone

    def _keyed(self, loader: DataLoader[Any], role: LoaderRole) -> Any:
        if self.batch_size_is == "global" or self.joined > 1:
            return self._stream(loader, role)
        dealt = self._cut(loader, Deal(spread=False), joins=self.in_step and role != "train")
        return self._lockstep(dealt) if role == "train" else dealt

    def _stream(self, loader: Any, role: LoaderRole) -> Any:
        joins = role == "train" or self.in_step  # a rank joins a step for which it has no samples
        if self.batch_size_is == "global":
            ranks = self._divide(role), self.rank, self.num_ranks, joins, self.agree
            is_whole = partial(self.is_whole, role, True)
            return Divided(loader, self.strategy, *ranks, is_whole, structure=self.structure_of(loader))
        if self.joined > 1:
            raise ConfigError(
                "global_view joins a loader's batches by indices, which this one lacks. Set batch_size_is=global."
            )
        loader = self._seeded(loader) if isinstance(loader, DataLoader) else loader
        return self._lockstep(loader) if joins else loader

    def _lockstep(self, loader: Any) -> Lockstep:
        structure = self.structure_of(loader)
        return Lockstep(loader, self.strategy, self.num_ranks, self.sum_over_ranks, structure=structure)

    def _seeded(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        clone = copy.copy(loader)
        clone._iterator = None
        clone.worker_init_fn = partial(_seed_worker, rank=self.rank, then=loader.worker_init_fn)
        clone.in_order = True  # shares, and the places of predictions, are known in the order of the sampler
        object.__setattr__(clone, "evener_original", loader)
        return clone


def _distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    candidates = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return next((sampler for sampler in candidates if isinstance(sampler, DistributedSampler)), None)


def source_of(loader: Any) -> Source | None:
    """What cuts a rank's batches and knows their shares; None if all ranks have the same weight."""
    return loader if isinstance(loader, Stream) else getattr(loader, "rank_batches", None)


def merge_predictions(loop: Any, rank: int, gather: Callable[[Any], list[Any]]) -> None:
    """Give rank 0's loop all ranks' predictions in the order of batches, or rank by rank of streams of their own."""
    loaders = loop._combined_loader.flattened
    for loader, predictions in zip(loaders, loop._predictions, strict=True):
        source = source_of(loader)
        places = None if source is None or isinstance(source, Lockstep) else source.passes.current.positions
        known = [(rank, i) if places is None else (places[i], 0) for i in range(len(predictions))]
        if gathered := gather(list(zip(known, predictions, strict=True))):
            in_order = sorted((entry for part in gathered for entry in part), key=itemgetter(0))
            predictions[:] = [prediction for _, prediction in in_order]


def _seed_worker(worker: int, rank: int, then: Callable[[int], None] | None) -> None:
    """Seed python, numpy and torch of a worker by rank and worker, then call the loader's own `worker_init_fn`."""
    pl_worker_init_function(worker, rank)
    if then is not None:
        then(worker)
