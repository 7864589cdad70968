"""Run a rank's steps: read its share of the batch, run the module's step in a layout, and weight its loss."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from math import fsum
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torchmetrics.wrappers import Running
from typing_extensions import override

from ..batch.exact.loss_reader import LossReader
from ..batch.exact.verdict import Plan, Views
from ..batch.exact.verifier import find_evaluated
from ..batch.layout import STEPS, PartsLayout
from ..batch.over_batch import Ranks, among
from ..batch.results import loss_weight, losses_in, weighs_in_loop, weight_in
from ..batch.run_structures import dataloader_index
from ..batch.structure import num_samples
from ..core.devices import flat_bytes
from ..core.errors import ConfigError
from ..core.loop_contract import StepContract
from ..core.module_log import lightning_modules, log_nothing, module_log, received
from ..core.patching import Kept, copied, kept_metrics, replaced
from ..core.types import Batch
from ..data.loaders import RankShares
from ..distributed.metrics import Part, RunMetrics
from ..distributed.objects import Agreement, gather_objects, gather_unequal
from ..distributed.wrapper import SyncedBatchNorm

if TYPE_CHECKING:
    from .strategy import RankStrategy


class RankStep(StepContract):
    """What a rank does in a step beside Lightning's part."""

    def __init__(self, strategy: "RankStrategy") -> None:
        self._strategy = strategy
        self.reader = LossReader(strategy.strategy_name)
        self.agreement = Agreement(strategy.strategy_name)
        self.shares = RankShares(1, strategy.strategy_name)
        self.rows = BatchRows(strategy, self)
        self.metrics = RunMetrics()
        self._num_evaluated: Counter[int] = Counter()
        self.evaluated = 0, 0
        """The loader whose batch is evaluated, and which of its global batches that is."""
        self._trainer: pl.Trainer
        self._module: pl.LightningModule

    def begin_run(self, trainer: pl.Trainer, plans: list[Plan] | None = None) -> None:
        """Begin a run with the ranks that the strategy has; `plans` say what losses divide by, if that is known."""
        self._trainer, self._module = trainer, trainer.lightning_module
        name, num_ranks = self._strategy.strategy_name, self._strategy.world_size
        self.shares = RankShares(num_ranks, name)
        self._strategy.whole_batches.begin_run(plans)
        self._strategy.layout.reader = self.reader = LossReader(name)
        if plans and weighs_in_loop(trainer):
            self.reader.take(plans[0], self._module)
        self.metrics.begin(num_ranks == 1, self._part)
        self.count_ranks(num_ranks)

    def count_ranks(self, num_ranks: int) -> None:
        """Share what comes next among so many ranks."""
        self.shares.regroup(num_ranks)
        self.metrics.is_whole = num_ranks == 1
        self.reader.values.over_ranks = num_ranks > 1
        mean = self._strategy.group.mean
        self.reader.sum_over_ranks = (lambda values: mean(values) * num_ranks) if num_ranks > 1 else None

    def begin_pass(self) -> None:
        """Begin a pass over loaders."""
        self.metrics.begin_pass(self._module)
        self._num_evaluated.clear()

    def _part(self) -> Part:
        """This rank's part of the batch in process, and whose hook runs."""
        results, shares, share = self._trainer._results, self.shares, self.shares.current
        in_batch = results is not None and results.batch is not None
        hook = "" if self.in_step else "batch" if in_batch else "epoch"
        if not in_batch or not shares.is_part:
            return 1.0, False, hook
        if share is None:
            return 1 / self._strategy.world_size, False, hook
        return share.num / share.total, share.num == 1, hook

    @property
    def in_step(self) -> bool:
        """Whether a step of the module runs, and no hook."""
        return "_module" in vars(self) and vars(self._module)["_current_fx_name"] in STEPS

    @property
    @override
    def meeting_device(self) -> torch.device:
        return self._strategy.layout.meeting_device

    @override
    def begin_batch(self, dataloader_idx: int) -> None:
        """Read this rank's share of the global batch from its next batch."""
        trainer, shares = self._trainer, self.shares
        self.reader.values.calls.clear()
        stage = trainer.state.stage  # by identity: Lightning's properties compare the names of stages
        if stage is None or stage is RunningStage.PREDICTING:
            joins = stage is not None and self._strategy.sync.evaluates_together
            if joins or shares.current is not None:
                combined = trainer.predict_loop._combined_loader if joins else None
                shares.begin_batch(combined, dataloader_idx)
            return
        trains = stage is RunningStage.TRAINING
        combined: Any = (trainer.fit_loop if trains else trainer._evaluation_loop)._combined_loader
        shares.begin_batch(combined, dataloader_idx, trains)
        if not trains:
            known = None if shares.current is None else shares.current.step
            self.evaluated = dataloader_idx, self._num_evaluated[dataloader_idx] if known is None else known
            self._num_evaluated[dataloader_idx] += shares.counts
            self._strategy.structures.lists.begin_batch(self.evaluated, 1.0 if shares.num is None else shares.num)

    @override
    def runs_alone(self, step: str) -> bool:
        single = not isinstance(self._strategy.layout, PartsLayout)
        alone = self._strategy.world_size == 1 and not self._strategy.sync.changes_evaluation
        plain = step != "training_step" and single and alone
        return plain and (step == "predict_step" or self.reader.values.knows_none(step))

    @override
    def stands_in(self) -> bool:
        return self._strategy.sync.evaluates_together and not self._trainer.training and not self.shares.counts

    def train(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run `training_step`; a rank without samples runs it with weight zero."""
        strategy, shares = self._strategy, self.shares
        counts, module = shares.counts, self._module
        strategy.balance.begin_step(module, strategy.loaders.change_policy)
        reader = self.reader
        reader.begin_step(counts, None if shares.current is None else shares.current.total)
        reader.values.begin()
        self.agreement.verify(module)  # before a forward pass gives all ranks the buffers of rank 0
        strategy.whole_batches.begin_step(args)
        is_manual = not module.automatic_optimization
        if is_manual:
            self._verify_parts(args[0])  # the step itself steps the optimizer
        plugin, run = strategy.precision_plugin, partial(self._train_in_layout, *args, **kwargs)
        with (
            nullcontext() if counts else zero_weight_step(module, self.metrics),
            among(self.rows),
            nullcontext() if type(plugin) is Precision else plugin.train_step_context(),
        ):
            output = strategy.sync.train(strategy.whole_batches.of_chunks.run, "training_step", run)
        if not counts:
            reader.values.calls[-1] = {}, {}  # nothing of what a stand-in logs counts
        module_weighs = weight_in(output) is not None
        if not counts and output is not None:  # None in manual optimization
            output = {**(output if isinstance(output, dict) else {"loss": output}), "loss_weight": 0.0}
        if module_weighs:
            own = loss_weight(output, args[0])
            own = own.to(strategy.root_device) if isinstance(own, Tensor) else own
            shares.weigh(own, strategy.group.mean(own), strategy.layout.losses or losses_in(output))
        elif not is_manual:
            self._verify_parts(args[0])
        if not (is_manual or strategy.layout.cut_by):
            reader.scale()
        return output

    def _verify_parts(self, batch: Batch) -> None:
        trainer, structures = self._trainer, self._strategy.structures
        self.shares.verify_parts(trainer.fit_loop, batch, lambda: structures.of_batch(trainer).with_rows)

    def _train_in_layout(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        strategy, module, step = self._strategy, self._module, self._strategy.layout.step
        if module.automatic_optimization and not strategy.layout.cut_by:
            step = self.reader.reading(step, self.shares.num or num_samples(args[0]) or 1)
        with strategy.balance.forward(strategy.root_device):
            call = partial(step, "training_step", *args, **kwargs)
            if strategy.layout.cut_by or not self.shares.counts:
                return call()
            return self.reader.values.recorded("training_step", 0, module, call)

    def evaluate(self, step: str, context: Callable[[], AbstractContextManager[Any]], *args: Any, **kwargs: Any) -> Any:
        """Run a step of evaluation, in a context of the precision plugin."""
        self.reader.values.begin()
        with context(), among(self.rows):
            return self._strategy.sync.evaluate(partial(self._evaluate_in_layout, step, *args, **kwargs))

    def _evaluate_in_layout(self, step: str, *args: Any, **kwargs: Any) -> Any:
        layout = self._strategy.layout
        if not self.stands_in():
            call = partial(layout.step, step, *args, **kwargs)
            of_chunks = self._strategy.whole_batches.of_chunks
            if layout.cuts_evaluation(step) and step == "predict_step":  # its batches are not cut over ranks
                loader, views = dataloader_index(self._trainer, args[1:]), Views(ranks=False, chunks=True)
                with of_chunks.where_needed(step):
                    find_evaluated(self._strategy, views, step, loader, of_chunks.allowed, args=args)
            if layout.cuts_evaluation(step) or step == "predict_step":
                return of_chunks.run(step, call)
            return self.reader.values.recorded(step, self.evaluated[0], self._module, call)
        with zero_weight_step(self._module, self.metrics, silent=True):
            getattr(self._module, step)(*args, **kwargs)
        return None

    @override
    def accumulating(self, seen: bool) -> AbstractContextManager[Any]:
        return self._strategy.sync.accumulating(seen)

    @override
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Weight this rank's loss, so that the mean of all ranks' gradients is the gradient of the global batch."""
        strategy = self._strategy
        loss = self.shares.scaled(loss, weighs_in_loop(self._trainer))
        strategy.sync.begin_backward(loss)
        return loss

    @override
    def finish_backward(self) -> None:
        """Complete the gradients of this process, and those of the ranks."""
        strategy = self._strategy
        strategy.sync.finish_backward()
        strategy.balance.finish_backward(self.shares.num or 0.0, strategy.loaders.exchange)

    @override
    def changes_update(self, optimizer: Optimizer) -> bool:
        return self._strategy.sync.changes_update or isinstance(optimizer, LBFGS)

    def agreed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """What an optimizer gets as its closure: where it decides by the loss, one of the global batch's loss."""
        decides = isinstance(optimizer, LBFGS) and self._strategy.world_size > 1
        return (lambda: self._whole_loss(closure())) if decides else closure

    def _whole_loss(self, loss: Tensor) -> Tensor:
        """The loss of the global batch, of which each rank has its own; every rank must call it."""
        whole = self.reader.whole
        if whole is None:
            told: list[tuple[float, float]] = gather_objects((float(loss), float(self.shares.scale)))
            whole = fsum(one * weight for one, weight in told if weight) / len(told)
        return torch.full_like(loss.detach(), float(whole))

    @override
    def finish_step(self) -> None:
        self.agreement.verify(self._module)
        if self._strategy.layout.finish_step():
            self._strategy.sync.wrap_again()

    @override
    def whole_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        return self._strategy.sync.whole_gradients(module)

    @override
    def restore_gradients(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        self._strategy.sync.restore_gradients(module, gradients)

    def end(self) -> None:
        """End the run."""
        self.agreement.end()
        self.metrics.end()


class BatchRows(Ranks):
    """This rank's rows among those of the batches of a run, for `evener.over_batch` and `all_gather`."""

    def __init__(self, strategy: "RankStrategy", contract: RankStep) -> None:
        self._strategy, self._contract = strategy, contract

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
        is_known = stage is RunningStage.TRAINING or self._contract.shares.current is not None
        return is_known and self.others_run("over_batch")

    @override
    def counts(self) -> bool:
        return self._contract.shares.counts

    @override
    def share(self) -> Tensor | float:
        return self._contract.shares.scale / self._strategy.world_size

    def others_run(self, call: str) -> bool:
        """Whether other ranks make a call, too; refuse it if some, without samples of what is evaluated, don't."""
        strategy = self._strategy
        share = self._contract.shares.current
        if not self._contract.in_step or share is None or strategy.trainer.training or strategy.sync.evaluates_together:
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
        if not self.others_run("all_gather"):
            return tensor.unsqueeze(0)  # with all rows
        own = tensor[:0] if tensor.dim() and self._contract.in_step and not self._contract.shares.counts else tensor
        shapes = gather_objects(tuple(own.shape), group)
        if len(set(shapes)) == 1:
            return None
        if len({shape[1:] for shape in shapes}) > 1 or () in shapes:  # gloo would abort, and NCCL return rubbish
            told = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
            raise ConfigError(
                f"{self._strategy.strategy_name}: all_gather was given tensors that differ in more than their rows: "
                f"{told}. Pad them to one shape first, or use a metric of torchmetrics (CatMetric)."
            )
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return gather_unequal(own, [shape[0] for shape in shapes], group).unsqueeze(0)


@contextmanager
def zero_weight_step(module: pl.LightningModule, run: RunMetrics, silent: bool = False) -> Generator[None]:
    """Run a step with weight zero: its attributes stay, as on ranks that have samples, and it leaves no other trace.

    A silent one logs nothing: in an evaluation ranks may log different names, in training they exchange what it logs.
    """
    buffers = [(part._buffers, dict(part.named_buffers(recurse=False))) for part in module.modules()]
    kept = Kept((), [(buffer, copied(buffer)) for buffer in module.buffers()])
    lists = [(value, len(value)) for value in vars(module).values() if type(value) is list]
    logs = map(module_log, lightning_modules(module))
    try:
        with ExitStack() as stack:
            for layer in module.modules():
                if isinstance(layer, SyncedBatchNorm):
                    stack.enter_context(replaced(layer, "counts", False))
            metrics = stack.enter_context(kept_metrics(module))
            stack.enter_context(received((log, log_nothing) for log in logs if silent))
            for _, state in metrics:
                del state["_computed"]  # on the other ranks an update has cleared it: all must compute it again
            stack.enter_context(run.counting(metrics))
            yield
            windows = [
                (m, m._num_vals_seen - state["_num_vals_seen"]) for m, state in metrics if isinstance(m, Running)
            ]
        for metric, num in windows:  # a window goes on by a batch without samples, so that all ranks' hold the same
            for _ in range(num):
                for name, default in metric.base_metric._defaults.items():
                    empty = default.detach().clone().to(metric.device) if isinstance(default, Tensor) else []
                    setattr(metric, f"{name}_{metric._num_vals_seen % metric.window}", empty)
                metric._num_vals_seen += 1
    finally:
        for own, before in buffers:  # the step may have put others in their place
            own.update(before)
        kept.restore()
        for value, length in lists:
            del value[length:]
