"""Gather tensors of all parts of a batch within a step (`self.all_gather`): each part gets the rows of all."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .meeting import Seat, seat


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
            return gathered(tensor, sync_grads, partial(torch.unsqueeze, dim=0))
        own, place = tensor if sync_grads and torch.is_grad_enabled() else tensor.detach(), seat()
        assert place is not None
        return place.meet("all_gather", own, _of_all_ranks)


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


def gathered(tensor: Tensor, sync_grads: bool, over_ranks: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Gather a tensor from all parts of a batch.

    Args:
        tensor: of shape (n, ...), where n may differ between parts.
        sync_grads: whether gradients go back to the parts' tensors.
        over_ranks: gathers the rows of this process's parts from all ranks; None for one process.

    Returns:
        All rows of the process's parts, of shape (N, ...), as one device has them; with ranks what `over_ranks` makes.
        Of parts' numbers, of shape (), the mean over samples, or the sum of integers.
    """
    place = seat()
    each = over_ranks or _same
    if place is None:
        return each(tensor)
    own = tensor if sync_grads and torch.is_grad_enabled() else tensor.detach()
    return place.meet("all_gather", own, partial(_joined, each, place))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _joined(each: Callable[[Tensor], Tensor], place: Seat, brought: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    first, *others = brought.values()
    parts = [first, *(own.to(first.device) for own in others)]
    if first.dim():
        whole = torch.cat(parts)
    elif first.is_floating_point():
        weights = torch.tensor([place.num_samples[part] for part in brought], dtype=first.dtype, device=first.device)
        whole = torch.stack(parts) @ (weights / weights.sum())
    else:
        whole = torch.stack(parts).sum(0)
    value = each(whole)
    return {part: value.to(own.device) for part, own in brought.items()}


def _of_all_ranks(brought: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    tensors = list(brought.values())
    if len({one.shape for one in tensors}) == 1:
        return dict.fromkeys(brought, torch.stack(tensors))
    if len({one.shape[1:] for one in tensors}) > 1:
        raise ValueError("all_gather is given rows of different shapes")
    return dict.fromkeys(brought, torch.cat(tensors).unsqueeze(0))
