"""Make the loader of each rank; the way to share samples depends on the loader.

loader                          per_device                       global
batches of indices              `Deal`: each rank whole batches  `Divide`: each rank a part of every batch
single keys (batch_size=None)   `Deal`, kept in step             every batch is read by all and divided
iterable dataset, any iterable  each rank its own, kept in step  every batch is read by all and divided
with a `DistributedSampler`     as it is                         refused
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch
from lightning_fabric.utilities.seed import pl_worker_init_function
from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.distributed import Work
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ..batch.policies import Even, Policy
from ..batch.structure import BatchStructure, Path, children
from ..core.errors import ConfigError, PartsDiffer
from ..core.types import Batch
from .sampling import Agree, Deal, Divide, RankBatches, Share
from .streams import Divided, Lockstep, Stream

LoaderRole: TypeAlias = Literal["train", "evaluate", "predict"]
BatchSizeIs: TypeAlias = Literal["per_device", "global"]
Source: TypeAlias = Stream | RankBatches


@dataclass
class RankLoaders:
    """Makes this rank's loaders from the user's; a policy divides training batches, evaluation does evenly."""

    strategy: str
    rank: int
    num_ranks: int
    batch_size_is: BatchSizeIs
    agree: Agree
    sum_over_ranks: Callable[[Tensor], Work]  # starts an in-place sum of a small CPU tensor
    policy: Policy = field(default_factory=Even)
    smallest: int = 1  # samples of a rank in training, if it has any
    structure_of: Callable[[Any], BatchStructure] = lambda loader: BatchStructure()
    in_step: bool = False  # ranks without samples of an evaluated batch join its step with weight zero
    divides: list[Divide] = field(default_factory=list)
    joined: int = 1  # ranks that compute a global batch of which each reads all
    is_whole: Callable[[LoaderRole], bool | None] = lambda role: False if role == "evaluate" else None

    def process(self, loader: Any, role: LoaderRole, managed: bool = True) -> Any:
        """Make the loader of this rank's batches from the user's, who divides the samples unless that is `managed`."""
        loader = getattr(loader, "evener_original", loader)  # a `CombinedLoader` keeps those made for a rank
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return self._stream(loader, role)
        samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        shared = next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)
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
            if self.batch_size_is == "global" or self.joined > 1:
                return self._stream(loader, role)
            dealt = self._cut(loader, Deal(spread=False), joins=self.in_step and role != "train")
            return self._lockstep(dealt) if role == "train" else dealt
        deal = Deal(role != "predict", self.smallest if role == "train" else 1, self.joined)
        cut = self._divide(role) if self.batch_size_is == "global" else deal
        is_whole = None if role == "predict" else partial(self.is_whole, role)
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

    def _stream(self, loader: Any, role: LoaderRole) -> Any:
        joins = role == "train" or self.in_step  # a rank joins a step for which it has no samples
        if self.batch_size_is == "global":
            ranks = self._divide(role), self.rank, self.num_ranks, joins, self.agree
            return Divided(
                loader, self.strategy, *ranks, partial(self.is_whole, role), structure=self.structure_of(loader)
            )
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


TRAINED = (
    "so no weight of a rank's loss makes the step one device's. Give them batch sizes that divide alike and "
    'drop_last=True, or return {"loss": loss, "loss_weight": n} with a loss that is a mean over n.'
)


class RankShares:
    """This rank's share of the current batch, by which its losses and logged means weigh."""

    def __init__(self, num_ranks: int, strategy: str) -> None:
        self._num_ranks, self._strategy = num_ranks, strategy
        self.current: Share | None = None  # if ranks have other weights
        self.counts = self.is_part = True  # this rank has samples of the batch; others may, too
        self.weight = 1.0  # turns a mean over ranks into one over samples
        self.scale: Tensor | float = 1.0  # of the loss: `weight`, or by the module's `loss_weight`
        self.weighed_losses: list[tuple[Sequence[Tensor], Tensor]] = []  # as they are logged, with those scales
        self.knows_parts = False
        self._parts: set[float] = set()
        self._rows_at: Path | None = None
        self._loaders: Sequence[Any] = ()
        self._sources: list[Source | None] = []

    @property
    def num(self) -> float | None:
        """The samples of this rank, if they are known."""
        return None if self.current is None else self.current.num

    def begin_batch(self, combined: CombinedLoader | None, dataloader_idx: int, trains: bool = False) -> None:
        """Take the share of the batch that was fetched from `combined` loaders; None if ranks need not know it."""
        self.weighed_losses.clear()
        loaders: Sequence[Any] = () if combined is None else combined._flattened
        if loaders is not self._loaders:
            self._loaders, self._sources = loaders, [source_of(loader) for loader in loaders]
        sources = self._sources
        if combined is not None and len(sources) > 1 and combined._mode == "sequential":
            sources = sources[dataloader_idx : dataloader_idx + 1]
        shares = [share for source in sources if source is not None and (share := self._next(source, combined))]
        self._become(shares[0] if shares else None)
        self._parts = {share.num / share.total for share in shares} if len(sources) > 1 else set()
        if trains:
            self.scale = self.weight

    def _next(self, source: Source, combined: Any) -> Share | None:
        """Take this rank's share of a loader's next batch; None if the loader, read beside longer ones, has ended."""
        shares = source.passes.read_by(combined._iterator).shares
        if shares:
            return shares.popleft()
        if combined._mode == "max_size":
            return None
        raise ConfigError(
            f"{self._strategy}: it isn't known which part of a global batch this batch is, because something else "
            "has read the loader in the same epoch (a callback with next(iter(trainer.train_dataloader)), or "
            "another call of batch_to_device). Read a loader of its own there."
        )

    def _become(self, share: Share | None) -> None:
        """Compute what follows from another share than that of the last batch."""
        self.current = share
        self.counts = share is None or share.num > 0
        self.is_part = share is None or share.num < share.total
        self.weight = 1.0 if share is None else self._num_ranks * share.num / share.total

    def regroup(self, num_ranks: int) -> None:
        """Share the next batch among fewer ranks."""
        self._num_ranks, self._loaders = num_ranks, ()
        self._become(None)

    def weigh(self, own: Tensor | float, total: Tensor, losses: Sequence[Tensor]) -> None:
        """Weight the losses by `own`, this rank's weight, not samples; `total` is the ranks' mean, by samples if 0."""
        scale = torch.where(total > 0, own / total, self.weight)
        self.weighed_losses.append((losses, scale))
        self.scale = scale.clamp(min=2.0**-60) if self.counts else scale

    def scaled(self, loss: Tensor, in_loop: bool = False) -> Tensor:
        """Weight this rank's loss: the ranks' mean, or their sum, which the loop divides, is the batch's gradient."""
        scale = float(self._num_ranks) if in_loop else self.scale
        if isinstance(scale, Tensor):
            return loss * scale.to(loss)
        return loss if scale == 1.0 else loss * torch.as_tensor(scale, dtype=loss.dtype)

    def verify_parts(self, loop: Any, batch: Batch, with_rows: Callable[[], Sequence[Path]] = tuple) -> None:
        """Refuse loaders of which this rank has unequal parts, and a batch whose `with_rows` are not its share."""
        if not self.knows_parts:
            verify_side_by_side(loop._combined_loader, self._strategy)
            self.knows_parts = True
            known = with_rows() if self.current is not None and self._num_ranks > 1 else ()
            self._rows_at = next((place for place in known if _num_rows(batch, place) == self.num), None)
        if len(self._parts) > 1:
            raise ConfigError(
                f"{self._strategy}: this rank has {' and '.join(f'{part:.3g}' for part in sorted(self._parts))} of "
                f"the batches of the loaders that are read side by side, {TRAINED}"
            )
        rows = self.num if self._rows_at is None or not self.counts else _num_rows(batch, self._rows_at)
        if rows not in (None, self.num):
            raise ConfigError(
                f"{self._strategy}: this rank has read {self.num:g} samples, but their batch has {rows} rows, so "
                "that its loss has no known weight. Have collate_fn and the transfer hooks keep all samples, or "
                'return {"loss": loss, "loss_weight": n} from training_step.'
            )


def _num_rows(batch: Batch, place: Path) -> int | None:
    """The rows of a tensor of a batch; None if another one has none there."""
    try:
        for key in place:
            batch = dict(children(batch) or [])[key]
        return batch.shape[0]
    except (KeyError, IndexError, AttributeError):  # a batch of another structure
        return None


def verify_side_by_side(combined: Any, strategy: str) -> None:
    """Refuse training loaders of which a rank has unequal parts in one step: its loss has one weight."""
    if unequal := _unequal_parts(combined):
        raise PartsDiffer(f"{strategy}: {unequal}, {TRAINED}")


def _unequal_parts(combined: CombinedLoader | None) -> str:
    """Which step of loaders that are read side by side, and again, gives unequal parts, as far as is known."""
    if combined is None or combined._mode == "sequential":
        return ""
    sources = map(source_of, combined.flattened)
    parts = [sizes for one in sources if isinstance(one, RankBatches) and (sizes := one.part_sizes())]
    for step in range(max(map(len, parts), default=0)):
        found = [sizes[step % len(sizes)] for sizes in parts]
        if len({tuple(num / sum(sizes) for num in sizes) for sizes in found}) > 1:
            told = " and ".join(" + ".join(map(str, sizes)) for sizes in found)
            return f"the loaders combined by {combined._mode!r} give the ranks unequal parts in step {step + 1}: {told}"
    return ""


def goes_whole(combined: CombinedLoader | None) -> bool:
    """Whether loaders are evaluated side by side of which a rank may have samples of one batch and none of another."""
    loaders = [] if combined is None or combined._mode == "sequential" else combined.flattened
    sources = list(map(source_of, loaders))
    if len(sources) < 2 or not all(isinstance(source, (RankBatches, Divided)) for source in sources):
        return False  # each rank has streams of its own
    is_known = all(isinstance(source, RankBatches) and source.part_sizes() is not None for source in sources)
    return not is_known or bool(_unequal_parts(combined))
