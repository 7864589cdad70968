"""Give every rank the whole batch, of which it computes some rows: what a step sees is one device's."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader
from typing_extensions import override

from ...batch.whole.gathering import SimulatedRanks, simulating
from ...core.errors import ConfigError
from ...core.rng import random_state, set_random_state
from ...core.types import Batch, Unit
from ...data.loaders import LoaderRole, RankLoaders
from ...data.sampling import Cut as BatchCut
from ...data.sampling import Deal
from ...distributed.objects import broadcast_object
from ...distributed.same_weights import verify_same_layout
from ..gradient_sync import GradientSync
from . import elementwise, layout, losses, sums
from .exchange import Cut, Exchange
from .rows import Rows, gathered

if TYPE_CHECKING:
    from ..strategy import RankStrategy


RULES_IN = (elementwise, layout, losses, sums)
"""The files that register rules when they are imported."""


class _Alone(SimulatedRanks):
    """What a step learns of ranks: it is the only one."""

    @override
    def gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        return tensor


_ALONE = _Alone(1)


class WholeBatch(GradientSync):
    """Computes steps of the whole batch on all ranks together, so that each has its gradients without an average.

    Args:
        strategy: whose steps these are. It answers as the only rank of its run.
    """

    def __init__(self, strategy: "RankStrategy") -> None:
        super().__init__(strategy)
        self._exchange: Exchange | None = None
        # an attribute, which loops call where they would move a batch themselves
        vars(strategy)["batch_to_device"] = partial(self._taken, strategy.batch_to_device)

    @override
    def wrap(self, wrap: Callable[[], None]) -> None:
        verify_same_layout(self._strategy.module, self._strategy.strategy_name)

    def begin_streams(self) -> None:
        """Have all ranks draw the same random numbers."""
        if dist.is_initialized():
            set_random_state(broadcast_object(random_state(), 0))

    @override
    def loaders_of(self, *args: Any, **kwargs: Any) -> RankLoaders:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make what gives this rank the global batch, in which each of the ranks would have one of the loader's."""
        return WholeLoaders(*args, **kwargs, joined=self._strategy.num_together)

    def _taken(self, to_device: Callable[..., Batch], *args: Any, **kwargs: Any) -> Batch:
        """Cut the tensors of a batch that every rank has read."""
        batch = to_device(*args, **kwargs)
        if self._exchange is None:
            self._exchange = Exchange(dist.get_rank(), dist.get_world_size())
        # a packed sequence has rows of time, and kernels read its lengths
        return apply_to_collection(batch, (Tensor, PackedSequence), self._rows)

    def _rows(self, whole: Any) -> Any:
        exchange = self._exchange
        assert exchange is not None
        if type(whole) is not Tensor or whole.layout is not torch.strided or whole.requires_grad:
            return whole
        num, size = exchange.size, whole.shape[0] if whole.dim() else 0
        if size < num or 0 in whole.shape or 0 in whole.stride():
            return whole
        sizes = tuple(size // num + (rank < size % num) for rank in range(num))
        cut = Cut(0, sizes, exchange)
        return Rows(cut.own(whole), cut, whole.stride(), known=whole)

    @override
    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with simulating(_ALONE), torch.compiler.set_stance("force_eager"):  # a compiler can't see into rows
            return step(*args, **kwargs)

    @override
    def evaluate(self, step: Callable[[], Any]) -> Any:
        with simulating(_ALONE), torch.compiler.set_stance("force_eager"):
            return step()

    @override
    def accumulating(self, seen: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def finish_backward(self) -> None:
        for parameter in self._strategy.module.parameters():
            if type(parameter.grad) is Rows:
                parameter.grad = gathered(parameter.grad.detach()).clone()

    @override
    def ending(self) -> AbstractContextManager[Any]:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.gathers:
            told = (
                f"{name} ({num}×, {exchange.num_bytes[name] / 1e6:.3g} MB)"
                for name, num in exchange.gathers.most_common(8)
            )
            rank_zero_info(f"global view: computed on all rows, on every rank: {', '.join(told)}")
        return super().ending()


@dataclass(frozen=True)
class Join:
    """Joins `num` batches of a loader, each meant for one rank, to the global batch that all ranks read."""

    num: int

    def parts(self, units: Iterator[Unit], num_ranks: int) -> Iterator[list[Unit]]:
        """See `sampling.Cut.parts`."""
        while group := list(islice(units, self.num)):
            yield [[index for unit in group for index in unit]]

    def count(self, num_units: int, num_ranks: int) -> int:
        """See `sampling.Cut.count`."""
        return -(-num_units // self.num)


@dataclass
class WholeLoaders(RankLoaders):
    """Makes loaders that give every rank the global batch."""

    joined: int = 1
    """Batches of a loader that make a global batch."""

    @override
    def _cut(self, loader: DataLoader[Any], cut: BatchCut, joins: bool) -> DataLoader[Any]:
        return super()._cut(loader, Join(self.joined) if isinstance(cut, Deal) else cut, joins)

    @override
    def _stream(self, loader: Any, role: LoaderRole) -> Any:
        if self.batch_size_is == "per_device":
            raise ConfigError(
                "ddp: global_view=true joins the batches of a loader by their indices, and this one has none. Set "
                "batch_size_is=global, where the loader's batch is the global one."
            )
        return super()._stream(loader, role)

    @override
    def _keyed(self, loader: DataLoader[Any], role: LoaderRole) -> Any:
        return self._stream(loader, role)
