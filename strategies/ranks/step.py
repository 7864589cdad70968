"""Run a rank's steps: read its share of the batch, run the module's step in a layout, and weight its loss."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from ..batch.checks.loss_check import LossCheck
from ..batch.checks.state_watch import StateWatch
from ..batch.layout import SingleLayout
from ..batch.losses import loss_weight, weighs_in_loop
from ..batch.structure import num_samples
from ..core.errors import ConfigError
from ..core.loop_contract import StepContract, has_context
from ..core.patching import replaced
from ..core.private import of_lightning
from ..data.combined import verify_side_by_side
from ..data.loaders import positions
from ..data.shares import RankShares
from ..distributed.metrics.run import RunMetrics
from ..distributed.objects import gather_objects
from ..distributed.same_weights import Agreement
from ..distributed.wrapper import StepReduction
from ..distributed.zero_weight_step import recompute_weights, zero_weight_step
from ._gradient_hooks import verify_hooks
from ._mixed_batches import verify_apart

if TYPE_CHECKING:
    from .strategy import RankStrategy

_STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


class RankStep(StepContract):
    """What a rank does in a step beside Lightning's part.

    Args:
        verify_loss: whether a loss that is no mean over samples is refused, where that can be found out.
    """

    def __init__(self, strategy: "RankStrategy", verify_loss: bool) -> None:
        self._strategy = strategy
        self._verifies_loss = verify_loss
        self._loss_check: LossCheck | None = None
        self.states = StateWatch(strategy.strategy_name, verify_loss)
        self.agreement = Agreement(strategy.strategy_name)
        self.shares = RankShares(1, strategy.strategy_name)
        """This rank's share of the current batch."""
        self.metrics: RunMetrics | None = None
        """Computes the values of metrics over all ranks; None outside a run."""
        self._weighs_in_loop = False
        self._evaluation_loop: Any = None
        self._trainer: pl.Trainer
        self._module: pl.LightningModule

    def begin_run(self, trainer: pl.Trainer) -> None:
        """Begin a run with the devices and ranks that the strategy has."""
        self._trainer, self._module = trainer, trainer.lightning_module
        name, num_ranks = self._strategy.strategy_name, self._strategy.world_size
        self.shares = RankShares(num_ranks, name)
        is_cut = num_ranks > 1 or bool(self._strategy.layout.cut_by)
        self._loss_check = LossCheck(name) if self._verifies_loss and is_cut else None
        self.states = StateWatch(name, self._verifies_loss)
        self.states.has_ended = not is_cut
        self.metrics = RunMetrics(not self._strategy.layout.cut_by, self._part, self._hook)

    def begin_pass(self, evaluation: Any) -> None:
        """Begin a pass over loaders, refusing an evaluation that ranks would not read side by side."""
        assert self.metrics is not None
        self.metrics.begin_pass(self._module)
        self._evaluation_loop = evaluation
        combined = getattr(evaluation, of_lightning.COMBINED_LOADER, None)
        verify_side_by_side(combined, self._strategy.strategy_name)

    def _part(self) -> tuple[float, bool] | None:
        """This rank's fraction of the batch in process, as `PartNumbers` asks for it."""
        results, shares = of_lightning.results(self._trainer), self.shares
        if results is None or results.batch is None:
            return None
        if not shares.counts:
            return 0.0, False
        if not shares.is_part:
            return None
        share = shares.current
        return (1 / self._strategy.world_size, False) if share is None else (share.num / share.total, share.num == 1)

    def _hook(self) -> str:
        """Whose hook runs, as `PartNumbers` asks for it."""
        if vars(self._module)["_current_fx_name"] in _STEPS:
            return ""
        results = of_lightning.results(self._trainer)
        return "epoch" if results is None or results.batch is None else "batch"

    @property
    @override
    def meeting_device(self) -> torch.device:
        return self._strategy.layout.meeting_device

    @override
    def begin_batch(self, dataloader_idx: int) -> None:
        """Read this rank's share of the global batch from its next batch, and tell metrics which batch that is."""
        trainer, shares = self._trainer, self.shares
        stage = trainer.state.stage  # by identity: Lightning's properties compare the names of stages
        if stage is None or stage is RunningStage.PREDICTING:
            joins = stage is not None and self._strategy.sync.evaluates_together
            if joins or shares.current is not None:
                combined = of_lightning.combined_loader(trainer.predict_loop) if joins else None
                shares.begin_batch(combined, dataloader_idx)
            return
        trains, metrics = stage is RunningStage.TRAINING, self.metrics
        combined: Any = of_lightning.combined_loader(trainer.fit_loop if trains else self._evaluation_loop)
        shares.begin_batch(combined, dataloader_idx, trains)
        assert metrics is not None
        metrics.steps.begin_batch(shares.is_part, shares.counts)
        if not trains and not shares.counts:  # the rank only joins in what the steps of others need
            return
        metrics.has_evaluated = not trains
        if not metrics.sync.watched:
            return
        num_trained: Any = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if trains:
            metrics.begin_training_batch(num_trained + 1)  # Lightning counts it after this
        else:
            places = positions(combined.flattened[dataloader_idx])
            metrics.begin_evaluated_batch(num_trained, dataloader_idx, places, self._strategy.world_size)

    @override
    def runs_alone(self, step: str) -> bool:
        single = isinstance(self._strategy.layout, SingleLayout)
        return step != "training_step" and single and not self._strategy.sync.evaluates_together

    @override
    def stands_in(self) -> bool:
        return self._strategy.sync.evaluates_together and not self._trainer.training and not self.shares.counts

    def train(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run `training_step`; a rank without samples runs it with weight zero."""
        strategy, shares = self._strategy, self.shares
        counts, module, trainer = shares.counts, self._module, self._trainer
        assert self.metrics is not None
        if strategy.balance is not None:
            strategy.balance.begin_step(module, strategy.root_device, strategy.loaders.change_policy)
        check, self._loss_check = self._loss_check, None
        if check is not None and strategy.world_size > 1:
            verify_apart(trainer, strategy.strategy_name)
            verify_hooks(module, strategy.strategy_name)
        if not module.automatic_optimization:
            shares.verify_parts(trainer.fit_loop, args[0])  # the step itself steps the optimizer
        if counts and self.states.has_ended and self.agreement.has_ended:
            output = self._own_step(*args, **kwargs)
        else:
            silent, looking = nullcontext() if counts else zero_weight_step(module, self.metrics.sync), nullcontext()
            if check is not None and counts:
                looking = check.open(module, strategy.layout, shares.num or num_samples(args[0]))
            with self._watching(module), silent, looking:
                output = self._own_step(*args, **kwargs)
        module_weighs = isinstance(output, dict) and output.get("loss_weight") is not None
        if not counts and output is not None:  # None in manual optimization
            output = {**(output if isinstance(output, dict) else {"loss": output}), "loss_weight": 0.0}
        self._weighs_in_loop = weighs_in_loop(trainer)
        if module_weighs:
            own = loss_weight(output, args[0])
            shares.weigh(own, strategy.group.mean(own), strategy.layout.losses)
        else:
            shares.verify_parts(trainer.fit_loop, args[0])
        if check is not None:
            self._close(check, None if module_weighs else shares.num, args, kwargs)
        return output

    def _close(self, check: LossCheck, num: float | None, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Refuse a loss that is no mean over samples; every rank must call it, since another one may be in doubt."""
        strategy = self._strategy
        assert self.metrics is not None
        trial = None if strategy.sync.evaluates_together else self.metrics.steps.unrecorded
        try:
            told = check.close(strategy, num, args, options, trial), None
        except ConfigError as exc:
            told = "", exc
        found = gather_objects(told)
        refusal = next((exc for _, exc in found if exc is not None), None)
        if refusal is not None:
            raise refusal
        if strategy.global_rank == 0:
            check.tell(next((doubt for doubt, _ in found if doubt), ""))

    @contextmanager
    def _watching(self, module: pl.LightningModule) -> Generator[None]:
        """Watch one of the first steps for what ranks must have in common; every rank must call it."""
        self.agreement.begin_step(module)
        if self.states.has_ended:
            yield
        else:
            layout, states, counts = self._strategy.layout, self.states, self.shares.counts
            cut = replaced(layout, "states", states if counts else None)
            with cut if layout.cut_by or not counts else states.part(module):
                yield
            states.close(gather_objects)
        if not (self.agreement.has_ended or module.automatic_optimization):
            self.agreement.verify_weights(module)

    def _own_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        strategy = self._strategy
        if has_context(strategy.precision_plugin, "train_step_context"):
            with strategy.precision_plugin.train_step_context():
                return strategy.sync.train(self._step_in_layout, *args, **kwargs)
        return strategy.sync.train(self._step_in_layout, *args, **kwargs)

    def _step_in_layout(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        strategy = self._strategy
        if strategy.balance is None:
            return strategy.layout.step("training_step", *args, **kwargs)
        with strategy.balance.forward():
            return strategy.layout.step("training_step", *args, **kwargs)

    def evaluate(self, step: str, context: Callable[[], AbstractContextManager[Any]], *args: Any, **kwargs: Any) -> Any:
        """Run a step of evaluation, in a context of the precision plugin."""
        strategy = self._strategy
        with strategy.sync.evaluating(step), context():
            if not self.stands_in():
                return strategy.layout.step(step, *args, **kwargs)
            assert self.metrics is not None
            with zero_weight_step(self._module, self.metrics.sync, silent=True):
                getattr(self._module, step)(*args, **kwargs)
            return None

    def end_validation(self) -> None:
        """Learn that a validation has ended."""
        assert self.metrics is not None
        if not self.metrics.has_evaluated:
            recompute_weights(self._module)

    def new_reduction(self) -> StepReduction | None:
        """Make what reduces this step's gradients before its loss is known; None if they can't be scaled afterwards."""
        return self._strategy.sync.new_reduction(self.shares.weight, self.shares.per_weight)

    @override
    def accumulating(self, seen: bool) -> AbstractContextManager[Any]:
        return self._strategy.sync.accumulating(seen)

    @override
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Weight this rank's loss, so that the mean of all ranks' gradients is the gradient of the global batch."""
        strategy = self._strategy
        inspect = strategy.layout.inspect  # set here only in the first step of manual optimization
        if inspect is not None and getattr(strategy.precision_plugin, "scaler", None) is None:
            inspect(loss, None)
        loss = self.shares.scaled(loss, self._weighs_in_loop, strategy.sync.is_reduced())
        strategy.sync.begin_backward(loss)
        if strategy.balance is not None:
            strategy.balance.begin_backward()
        return loss

    @override
    def finish_backward(self) -> None:
        """Complete the gradients of this process, and those of the ranks."""
        strategy = self._strategy
        later = strategy.layout.finishes_later
        if later:
            strategy.layout.finish_backward()
        strategy.sync.finish_backward(later)
        if strategy.balance is not None:
            share = self.shares.current
            strategy.balance.finish_backward(0.0 if share is None else share.num, strategy.loaders.exchange)

    @override
    def changes_update(self, optimizer: Optimizer) -> bool:
        return self._strategy.sync.changes_update or isinstance(optimizer, LBFGS)

    def agreed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return what an optimizer gets as its closure: where it decides by the loss, one of the global batch's loss.

        With a loss of its own each rank would decide otherwise, and train apart.
        """
        return partial(self._agreed_loss, closure) if isinstance(optimizer, LBFGS) else closure

    def _agreed_loss(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        return self.global_loss(loss) if loss is not None else None

    def global_loss(self, loss: Tensor) -> Tensor:
        """The loss of the global batch of the current step, of this rank's loss; called on every rank."""
        return self._strategy.reduce(self.shares.scaled(loss.detach().clone()), reduce_op="mean")

    @override
    def finish_step(self) -> None:
        if self._strategy.layout.finish_step():
            self._strategy.sync.wrap_again()

    @override
    def whole_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        return self._strategy.sync.whole_gradients(module)

    @override
    def restore_gradients(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        self._strategy.sync.restore_gradients(module, gradients)

    def reduce_logged(self, value: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce logged values; a mean over ranks weights each by its samples in the current batch."""
        if self.shares.current is not None and reduce_op in ("mean", "avg"):
            value = value * self.shares.weight
        return self._strategy.reduce(value, group, reduce_op)

    def end(self) -> None:
        """End the run."""
        self.agreement.end()
        if self.metrics is not None:
            self.metrics.end()
            self.metrics = None
