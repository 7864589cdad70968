"""Which part of a dimension each rank holds, and what ranks exchange to know all of it, or sums over it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...distributed.objects import gather_unequal


class Exchange:
    """Exchanges tensors between all ranks.

    Args:
        rank: this one's.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.of_all_rows = Counter[str]()
        """How often operations had to be computed of all rows."""

    def sum(self, local: Tensor) -> Tensor:
        """Sum a tensor, whose memory nobody else uses, over the ranks."""
        total = local.contiguous()
        torch.distributed.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
        return total

    def gather(self, local: Tensor, cut: "Cut") -> Tensor:
        """Gather what all ranks hold of a dimension."""
        rows = local.resolve_conj().resolve_neg().movedim(cut.dim, 0).contiguous()
        # as bytes, since gloo lacks some types
        found = gather_unequal(rows.unsqueeze(-1).view(torch.uint8), cut.sizes)
        return found.view(rows.dtype).squeeze(-1).movedim(0, cut.dim).contiguous()


@dataclass(frozen=True)
class Cut:
    """Which part of a dimension each rank holds: one block after the other, in order of rank.

    Args:
        dim: the dimension.
        sizes: of each rank's block.
        exchange: gathers them.
    """

    dim: int
    sizes: tuple[int, ...]
    exchange: Exchange = field(compare=False)

    @cached_property
    def length(self) -> int:
        """Of the whole dimension."""
        return sum(self.sizes)

    @cached_property
    def own_length(self) -> int:
        """Of this rank's part of it."""
        return self.sizes[self.exchange.rank]

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Shape of the whole, of which a rank holds a part of `shape`."""
        return [*shape[: self.dim], self.length, *shape[self.dim + 1 :]]

    def own_shape(self, shape: Sequence[int]) -> list[int]:
        """Shape of a rank's part of a whole of `shape`."""
        return [*shape[: self.dim], self.own_length, *shape[self.dim + 1 :]]

    def at(self, dim: int) -> "Cut":
        """The same of another dimension."""
        return self if dim == self.dim else Cut(dim, self.sizes, self.exchange)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        return whole.narrow(self.dim, sum(self.sizes[: self.exchange.rank]), self.own_length)
