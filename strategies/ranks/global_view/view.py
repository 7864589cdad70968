"""Give every rank the whole batch, of which it computes some rows, or all: what a step sees is one device's."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from ...batch.meeting import Alone, simulating
from ...core.devices import is_accelerator
from ...core.rng import random_state, set_random_state
from ...core.types import Batch
from ...distributed.objects import broadcast_object, verify_same_layout
from ...sharding.whole import broadcast_together
from ..gradient_sync import GradientSync
from ..shard_sync import ShardSync
from .rows import Rows, gathered, register, rows_of
from .rules import ELEMENTWISE, PRODUCTS, VIEWS

if TYPE_CHECKING:
    from ..strategy import RankStrategy

_BUCKET_BYTES = 25 * 2**20
"""Of gradients that are sent together."""

register({**ELEMENTWISE, **VIEWS, **PRODUCTS})


class _Whole(GradientSync):
    """Computes steps of the whole batch on every rank, some of its rows or all; each is the only rank of its run."""

    changes_evaluation = True
    seen_ranks = Alone()

    def __init__(self, strategy: "RankStrategy", by_rows: bool, *args: Any) -> None:
        super().__init__(strategy, *args)
        self.by_rows = by_rows
        seen, speed = ("steps see", "slower") if by_rows else ("each rank computes all of", "no faster than one rank")
        self.computes_whole = f"{seen} the global batch (strategy.global_view), which is exact but {speed}"
        if by_rows:  # an attribute, which loops call where they would move a batch themselves
            vars(strategy)["batch_to_device"] = partial(self._taken, strategy.batch_to_device)

    @override
    def begin_streams(self) -> None:
        if dist.is_initialized():  # all draw the same random numbers
            set_random_state(broadcast_object(random_state(), 0))

    def _taken(self, to_device: Callable[..., Batch], *args: Any, **kwargs: Any) -> Batch:
        """Cut the tensors of a batch that every rank has read."""
        batch, place = to_device(*args, **kwargs), (dist.get_rank(), dist.get_world_size())
        # a packed sequence has rows of time, and kernels read its lengths
        return apply_to_collection(batch, (Tensor, PackedSequence), rows_of, *place)

    @override
    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._seen():
            return super().train(step, *args, **kwargs)

    @override
    def evaluate(self, step: Callable[[], Any]) -> Any:
        with self._seen():
            return super().evaluate(step)

    @contextmanager
    def _seen(self) -> Generator[None]:
        stance = torch.compiler.set_stance("force_eager") if self.by_rows else nullcontext()
        with simulating(Alone()), stance:  # a compiler can't see into rows
            yield

    @override
    def finish_backward(self) -> None:
        for parameter in self._strategy.module.parameters():
            if type(parameter.grad) is Rows:
                parameter.grad = gathered(parameter.grad.detach()).clone()
        super().finish_backward()

    @override
    def whole_tree(self, tree: Any) -> Any:
        return tree_map_only(Rows, Rows.whole, tree)  # states of metrics; the first rank alone writes them


class WholeBatch(_Whole):
    """Computes steps of the whole batch where each rank holds the whole module, which is not wrapped."""

    @override
    def wrap(self, wrap: Callable[[], None]) -> None:
        verify_same_layout(self._strategy.module, self._strategy.strategy_name)

    @override
    def finish_backward(self) -> None:
        super().finish_backward()
        gradients = [p.grad for p in self._strategy.module.parameters() if p.grad is not None]
        if is_accelerator(self._strategy.root_device) and gradients and dist.get_world_size() > 1:
            # kernels of accelerators may add in another order each time, also where all ranks compute the same
            broadcast_together(gradients, _BUCKET_BYTES)


class WholeBatchOfShards(_Whole, ShardSync):
    """Computes steps of the whole batch where each rank holds shards. An average of equal gradients is each of them."""
