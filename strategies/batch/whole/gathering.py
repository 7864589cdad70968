"""Gather tensors of all ranks within a step (`self.all_gather`), also where one process stands in for them."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from ...core.errors import PartsDiffer
from .meeting import InTurn, seat


@dataclass
class SimulatedRanks:
    """Ranks that one process stands in for, each for a part of a batch.

    Args:
        size: how many there are.
    """

    size: int

    @property
    def rank(self) -> int:
        """That of the part whose step asks."""
        place = seat()
        return min(0 if place is None else place.part, self.size - 1)

    def gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        """What `all_gather` returns on each; see `RankStrategy.all_gather`."""
        if self.size == 1:
            return gathered(tensor, "", partial(torch.unsqueeze, dim=0))
        own, place = tensor if sync_grads and torch.is_grad_enabled() else tensor.detach(), seat()
        assert place is not None
        return place.meet("all_gather", own, _of_all_ranks)


class Alone(SimulatedRanks):
    """What a step learns of ranks: it is the only one."""

    def __init__(self) -> None:
        super().__init__(1)

    @override
    def gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        return tensor


_simulated: list[SimulatedRanks] = []


@contextmanager
def simulating(ranks: SimulatedRanks) -> Generator[None]:
    """Have strategies answer for other ranks inside the block."""
    _simulated.append(ranks)
    try:
        yield
    finally:
        _simulated.pop()


def simulated_ranks() -> SimulatedRanks | None:
    """The ranks that this process stands in for; None outside of `simulating`."""
    return _simulated[-1] if _simulated else None


def gathered(tensor: Tensor, strategy: str, over_ranks: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Gather a tensor of this process's part of a batch.

    Args:
        tensor: of shape (n, ...), where n may differ between ranks.
        strategy: name that begins messages.
        over_ranks: gathers the rows from all ranks; None for one process.

    Raises:
        PartsDiffer: a part of the process's batch calls it, which has no rows of the others.
    """
    place = seat()
    if isinstance(place, InTurn) or (place is not None and len(place.num_samples) > 1):
        raise PartsDiffer(
            f"{strategy}: all_gather is called on a part of a batch. Compute the loss in evener.over_batch(fn)(...)"
        )
    return tensor if over_ranks is None else over_ranks(tensor)


def _of_all_ranks(brought: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    tensors = list(brought.values())
    if len({one.shape for one in tensors}) == 1:
        return dict.fromkeys(brought, torch.stack(tensors))
    if len({one.shape[1:] for one in tensors}) > 1:
        raise ValueError("all_gather is given rows of different shapes")
    return dict.fromkeys(brought, torch.cat(tensors).unsqueeze(0))
