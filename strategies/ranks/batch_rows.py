"""Gather the rows of a global batch from the ranks, for what is computed over the batch (`evener.over_batch`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytorch_lightning.trainer.states import RunningStage
from torch import Tensor
from typing_extensions import override

from ..batch.whole.over_batch import Ranks
from ..core.devices import flat_bytes
from ..core.errors import ConfigError
from ..distributed.objects import gather_objects, gather_unequal

if TYPE_CHECKING:
    from .strategy import RankStrategy


class BatchRows(Ranks):
    """This rank's part of the batches of a run."""

    def __init__(self, strategy: "RankStrategy") -> None:
        self._strategy = strategy

    @property
    @override
    def rank(self) -> int:
        return self._strategy.global_rank

    @override
    def is_part(self) -> bool:
        strategy = self._strategy
        stage, contract = strategy.trainer.state.stage, strategy.contract
        if strategy.world_size == 1 or stage in (RunningStage.PREDICTING, None):
            return False
        is_known = stage is RunningStage.TRAINING or contract.shares.current is not None
        return is_known and contract.others_run("over_batch")

    @override
    def counts(self) -> bool:
        return self._strategy.contract.shares.counts

    @override
    def share(self) -> Tensor | float:
        return self._strategy.contract.shares.scale / self._strategy.world_size

    @override
    def gather(self, rows: Sequence[Tensor]) -> list[list[Tensor]]:
        """Gather tensors of any types and numbers of rows, as bytes; refuse rows of other shapes than other ranks'."""
        everyones = gather_objects([(tuple(own.shape), str(own.dtype)) for own in rows])
        if len({tuple((shape[1:], dtype) for shape, dtype in theirs) for theirs in everyones}) > 1:
            told = "; ".join(f"{theirs} on rank {rank}" for rank, theirs in enumerate(everyones))
            raise ConfigError(
                f"{self._strategy.strategy_name}: over_batch was given rows of different shapes: {told}. Ranks may "
                "have different numbers of rows, but not rows of different shapes: pad them to one."
            )
        return [self._rows_of(own, [theirs[i][0][0] for theirs in everyones]) for i, own in enumerate(rows)]

    def _rows_of(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every rank's rows of one tensor."""
        width = own.shape[1:].numel() * own.element_size()
        content = flat_bytes(own.contiguous().to(self._strategy.root_device))
        gathered = gather_unequal(content.view(len(own), width), sizes).to(own.device).view(-1).view(own.dtype)
        return list(gathered.view(sum(sizes), *own.shape[1:]).split(list(sizes)))
