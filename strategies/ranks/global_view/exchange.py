"""Which part of a dimension each rank holds, and what ranks exchange to know all of it, or sums over it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.reduction import all_reduce, gather_unequal


class Exchange:
    """Exchanges tensors between ranks.

    Args:
        rank: this one's.
        group: the process group; None for that of all ranks.
    """

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group
        self.gathers: Counter[str] = Counter()
        """How often all rows were gathered, by operation."""
        self.num_bytes: Counter[str] = Counter()
        """Bytes that were gathered, by operation."""

    def count(self, name: str, num_bytes: int) -> None:
        """Count a tensor that was gathered for an operation."""
        self.gathers[name] += 1
        self.num_bytes[name] += num_bytes

    def sum(self, local: Tensor) -> Tensor:
        """Sum a tensor, whose memory nobody else uses, over the ranks."""
        total = local.contiguous()
        all_reduce(torch.view_as_real(total) if total.is_complex() else total, dist.ReduceOp.SUM, self._group)
        return total

    def gather(self, local: Tensor, cut: "Cut") -> Tensor:
        """Gather what all ranks hold of a dimension."""
        rows = local.resolve_conj().resolve_neg().movedim(cut.dim, 0).contiguous()
        # as bytes, since gloo lacks some types
        found = gather_unequal(rows.unsqueeze(-1).view(torch.uint8), cut.sizes, self._group)
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

    @cached_property
    def start(self) -> int:
        """Where this rank's block begins."""
        return [0, *accumulate(self.sizes)][self.exchange.rank]

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
        return whole.narrow(self.dim, self.start, self.own_length)
