"""Read this rank's share of each batch, by which its loss and its logged means weigh."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Tensor

from ..batch.losses import WeighedLoss
from ..batch.tree import Path, at
from ..core.errors import ConfigError
from ..core.types import Batch
from .combined import TRAINED, verify_side_by_side
from .loaders import Source, source_of
from .sampling import Share


class RankShares:
    """This rank's share of the current batch.

    Args:
        strategy: name that begins messages.
    """

    def __init__(self, num_ranks: int, strategy: str) -> None:
        self.current: Share | None = None
        """The share; None if all ranks have the same weight."""
        self._num_ranks = num_ranks
        self._strategy = strategy
        self.counts = True
        """Whether this rank has samples of the batch."""
        self.is_part = True
        """Whether other ranks may have samples of the batch, too."""
        self.weight = 1.0
        """What turns a mean over ranks into a mean over samples, when each rank's value is multiplied by it."""
        self.scale: Tensor | float = 1.0
        """What the loss of the training batch is multiplied by: `weight`, or by the module's `loss_weight`."""
        self.weighed_losses: list[WeighedLoss] = []
        """The losses of the batch for which the module returned a `loss_weight`; several if a closure ran again."""
        self._parts: set[float] = set()
        self.knows_parts = False
        """Whether the first training batch was looked at."""
        self._rows_at: list[Path] = []
        self._loaders: Sequence[Any] = ()
        self._sources: list[Source | None] = []

    @property
    def num(self) -> float | None:
        """The samples of this rank; None if all ranks have the same weight."""
        return None if self.current is None else self.current.num

    def begin_batch(self, combined: CombinedLoader | None, dataloader_idx: int, trains: bool = False) -> None:
        """Take the shares of the batch that was fetched.

        Args:
            combined: the loaders that it was fetched from; None if ranks need not know its share.
            dataloader_idx: the one that it was fetched from, if they are read one after the other.

        Raises:
            ConfigError: the batch has no share, since something else than the loop has read the loader.
        """
        self.weighed_losses.clear()
        loaders: Sequence[Any] = () if combined is None else combined._flattened
        if loaders is not self._loaders:
            self._loaders, self._sources = loaders, [source_of(loader) for loader in loaders]
        sources = self._sources
        if combined is not None and len(sources) > 1 and combined._mode == "sequential":
            sources = sources[dataloader_idx : dataloader_idx + 1]
        shares = [share for source in sources if source is not None and (share := self._next(source, combined))]
        share = shares[0] if shares else None
        if share is not self.current:
            self._become(share)
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

    def weigh(self, own: Tensor | float, total: Tensor, losses: Sequence[Tensor]) -> None:
        """Weight the loss by what the module returned as its `loss_weight`, in place of its samples.

        Args:
            own: the weight of this rank's loss.
            total: the mean of the ranks' weights.
            losses: see `WeighedLoss`.
        """
        self.scale = torch.where(total > 0, own / total, 0.0)
        self.weighed_losses.append(WeighedLoss(losses, self.scale))

    def scaled(self, loss: Tensor, in_loop: bool = False) -> Tensor:
        """Weight this rank's loss, so that the mean of all ranks' gradients is the gradient of the global batch.

        Args:
            in_loop: whether the loop divides the sum of the ranks' gradients by the sum of all weights.
        """
        scale = float(self._num_ranks) if in_loop else self.scale
        if isinstance(scale, Tensor):
            return loss * scale.to(loss)
        return loss if scale == 1.0 else loss * torch.as_tensor(scale, dtype=loss.dtype)

    def begin_training(self) -> None:
        """Look at the training loaders again, which may be other ones."""
        self.knows_parts = False

    def verify_parts(self, loop: Any, batch: Batch, with_rows: Callable[[], Sequence[Path]] = tuple) -> None:
        """Refuse training loaders of which this rank has unequal parts, in any step where that can be known.

        Args:
            loop: of the training.
            batch: this rank's, which must have the samples of its share.
            with_rows: returns which tensors of a batch are known to have one row per sample; asked at the first batch.

        Raises:
            ConfigError: the parts differ, or the batch has other samples than its share, so that no weight of this
                rank's loss is right.
        """
        if not self.knows_parts:
            verify_side_by_side(loop._combined_loader, self._strategy, TRAINED, loop.max_batches)
            self.knows_parts = True
            known = with_rows() if self.current is not None and self._num_ranks > 1 else ()
            self._rows_at = [place for place in known if _num_rows(batch, place) == self.num]
        if len(self._parts) > 1:
            raise ConfigError(
                f"{self._strategy}: this rank has {' and '.join(f'{part:.3g}' for part in sorted(self._parts))} of "
                f"the batches of the loaders that are read side by side, {TRAINED}"
            )
        rows = self.num
        while self._rows_at and self.counts and rows is not None:
            rows = _num_rows(batch, self._rows_at[0])
            if rows == self.num:
                return
            self._rows_at.pop(0)  # it had as many by chance
            if rows is not None and not self._rows_at:
                raise ConfigError(
                    f"{self._strategy}: this rank has read {self.num:g} samples, but their batch has {rows} rows, so "
                    "that its loss has no known weight. Have collate_fn and the transfer hooks keep all samples, or "
                    'return {"loss": loss, "loss_weight": n} from training_step.'
                )


def _num_rows(batch: Batch, place: Path) -> int | None:
    """The rows of a tensor of a batch; None if another one has none there."""
    try:
        return at(batch, place).shape[0]
    except (KeyError, IndexError, AttributeError):  # a batch of another structure
        return None
