"""Exchange within a step what the global batch is needed for: rows of tensors, numbers by which something decides."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.callbacks import SpikeDetection
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.tuner.lr_finder import _LRCallback
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from ..batch.over_batch import Ranks
from ..core.devices import flat_bytes
from ..core.errors import ConfigError
from ..core.module_checks import callbacks_of
from ..core.patching import Replacement, replaced
from ..distributed.objects import gather_objects, gather_unequal

if TYPE_CHECKING:
    from .strategy import RankStrategy


class BatchRows(Ranks):
    """This rank's rows among those of the batches of a run, for `evener.over_batch` and `all_gather`."""

    def __init__(self, strategy: "RankStrategy") -> None:
        self._strategy = strategy

    @property
    @override
    def rank(self) -> int:
        return self._strategy.global_rank

    @override
    def is_part(self) -> bool:
        strategy = self._strategy
        stage = strategy.trainer.state.stage
        if strategy.world_size == 1 or stage in (RunningStage.PREDICTING, None):
            return False
        is_known = stage is RunningStage.TRAINING or strategy.contract.shares.current is not None
        return is_known and self.others_run("over_batch")

    @override
    def counts(self) -> bool:
        return self._strategy.contract.shares.counts

    @override
    def share(self) -> Tensor | float:
        return self._strategy.contract.shares.scale / self._strategy.world_size

    def others_run(self, call: str) -> bool:
        """Whether other ranks make a call, too; refuse it if some, without samples of what is evaluated, don't."""
        strategy = self._strategy
        contract, share = strategy.contract, strategy.contract.shares.current
        if not contract.in_step or share is None or strategy.trainer.training or strategy.sync.evaluates_together:
            return True
        if share.some_empty and share.num != share.total:
            raise ConfigError(
                f"{strategy.strategy_name}: {call} in a step of evaluation on {share.total:g} samples, of which some "
                "ranks have none, and don't run it. Append to a list of the module, which has all samples in "
                "on_validation_epoch_end, or set drop_last=True."
            )
        return share.num != share.total

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
        found = list[list[Tensor]]()
        for i, own in enumerate(rows):
            sizes, width = [theirs[i][0][0] for theirs in everyones], own.shape[1:].numel() * own.element_size()
            content = flat_bytes(own.contiguous().to(self._strategy.root_device)).view(len(own), width)
            joined = gather_unequal(content, sizes).to(own.device).view(-1).view(own.dtype)
            found.append(list(joined.view(sum(sizes), *own.shape[1:]).split(sizes)))
        return found

    def of_all(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor | None:
        """What `RankStrategy.all_gather` returns of this rank's rows; None if they have one shape on all ranks."""
        contract, name = self._strategy.contract, self._strategy.strategy_name
        if not self.others_run("all_gather"):
            return tensor.unsqueeze(0)  # with all rows
        own = tensor[:0] if tensor.dim() and contract.in_step and not contract.shares.counts else tensor
        shapes = gather_objects(tuple(own.shape), group)
        if len(set(shapes)) == 1:
            return None
        if len({shape[1:] for shape in shapes}) > 1 or () in shapes:  # gloo would abort, and NCCL return rubbish
            told = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
            raise ConfigError(
                f"{name}: all_gather was given tensors that differ in more than their rows: {told}. Pad them to one "
                "shape first, or use a metric of torchmetrics (CatMetric)."
            )
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return gather_unequal(own, [shape[0] for shape in shapes], group).unsqueeze(0)


@contextmanager
def deciding_alike(strategy: "RankStrategy") -> Generator[None]:
    """Have what decides by a number in a step decide by the same one on all ranks, that of the global batch.

    Lightning's search for a learning rate and `SpikeDetection` judge a step by its loss; a `ReduceLROnPlateau` is
    stepped by a module itself, in manual optimization or in its own `lr_scheduler_step`, by what it likes.
    """
    shared = {id(config.scheduler) for config in strategy.lr_scheduler_configs}
    contract, own = strategy.contract, ReduceLROnPlateau.step

    def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        own(scheduler, contract.agree(float(metrics)) if id(scheduler) in shared else metrics, *args, **kwargs)

    def judge(own: Any, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        own(trainer, module, outputs if loss is None else contract.whole_loss(loss), *rest)

    # of the class: what a scheduler has of its own goes into checkpoints
    with ExitStack() as stack, replaced(ReduceLROnPlateau, "step", step):
        for callback in callbacks_of(strategy.trainer):
            if isinstance(callback, (_LRCallback, SpikeDetection)):
                stack.callback(Replacement(callback, "on_train_batch_end", judge).remove)
        yield
