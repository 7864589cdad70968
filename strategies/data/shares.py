"""Read this rank's share of each batch, by which its loss and its logged means weigh."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor

from ..batch.structure import Path, children
from ..core.errors import ConfigError, PartsDiffer
from ..core.types import Batch
from .loaders import Source, source_of
from .sampling import RankBatches, Share
from .streams import Divided

TRAINED = (
    "so no weight of a rank's loss makes the step one device's. Give them batch sizes that divide alike and "
    'drop_last=True, or return {"loss": loss, "loss_weight": n} with a loss that is a mean over n.'
)


class RankShares:
    """This rank's share of the current batch.

    Attributes:
        current: the share; None if all ranks have the same weight.
        counts, is_part: whether this rank has samples of the batch, and whether others may have some, too.
        weight: what turns a mean over ranks into one over samples, when each rank's value is multiplied by it.
        scale: what the loss of the training batch is multiplied by: `weight`, or by the module's `loss_weight`.
        weighed_losses: losses as they are logged, with their scales, where the module returned a `loss_weight`.
        knows_parts: whether the first training batch was looked at.
    """

    def __init__(self, num_ranks: int, strategy: str) -> None:
        self._num_ranks, self._strategy = num_ranks, strategy
        self.current: Share | None = None
        self.counts = self.is_part = True
        self.weight = 1.0
        self.scale: Tensor | float = 1.0
        self.weighed_losses: list[tuple[Sequence[Tensor], Tensor]] = []
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
        """Weight the losses by `own`, this rank's weight, not samples; `total` is the ranks' mean, by samples if 0.

        A rank whose samples weigh nothing has rows in `over_batch`, whose gradients are divided by the scale again.
        """
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
        """Refuse training loaders of which this rank has unequal parts, and a batch with other rows than its share.

        `with_rows` tells, at the first batch, which tensors are known to have one row per sample.
        """
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
        first, *others = (sizes[step % len(sizes)] for sizes in parts)
        for sizes in others:
            if any(mine * sum(first) != other * sum(sizes) for mine, other in zip(sizes, first, strict=True)):
                one, other = (" + ".join(map(str, given)) for given in (first, sizes))
                what = f"in step {step + 1}: {one} samples of one loader and {other} of another"
                return f"the loaders combined by {combined._mode!r} give the ranks unequal parts {what}"
    return ""


def goes_whole(combined: CombinedLoader | None) -> bool:
    """Whether loaders are evaluated side by side of which ranks may have unequal parts.

    A rank that skipped the batch of one loader only, since it has no samples of it, would have others beside it.
    """
    loaders = [] if combined is None or combined._mode == "sequential" else combined.flattened
    sources = list(map(source_of, loaders))
    if len(sources) < 2 or not all(isinstance(source, (RankBatches, Divided)) for source in sources):
        return False  # each rank has streams of its own
    is_known = all(isinstance(source, RankBatches) and source.part_sizes() is not None for source in sources)
    return not is_known or bool(_unequal_parts(combined))
