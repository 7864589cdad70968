"""Run one lean step of validation, test or prediction."""

from typing import Any

from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from ...strategies.core.private import of_lightning
from ...strategies.core.private.of_lightning import (
    DataLoaderIterDataFetcher,
    EvaluationLoop,
    PredictionLoop,
    TrainingEpochLoop,
)
from ...strategies.core.types import Batch
from ...strategies.registry import contract_of
from ._batch_fetch import OneLoader, batch_mover, to_cpu
from ._hook_plan import HookPlan, may_be_lean


class StepPlan:
    """The calls that a validation, test or prediction loop makes for each batch, resolved once per run.

    Args:
        loop: Lightning's loop, with its data set up.

    Attributes:
        is_current: whether nothing that may patch a hook has run since the plan was compared with the hooks.
    """

    def __init__(self, loop: EvaluationLoop | PredictionLoop) -> None:
        trainer, predicts = loop.trainer, isinstance(loop, PredictionLoop)
        stage = "predict" if predicts else "test" if trainer.testing else "validation"
        self.connector: Any = of_lightning.logger_connector(trainer)
        self.results: Any = None if predicts else of_lightning.results(loop)
        self.step_name = f"{stage}_step"
        self.start_name, self.end_name = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        self.hooks = HookPlan(trainer, (self.start_name, self.end_name), getattr(trainer, "timed_bar", None))
        combined = of_lightning.combined_loader(loop)
        assert combined is not None
        fetcher = of_lightning.data_fetcher(loop)
        self.loader = OneLoader(fetcher) if fetcher is not None and OneLoader.fits(fetcher) else None
        self.sanity_checks = trainer.sanity_checking
        self.contract = contract_of(trainer.strategy)
        self.names_loader = of_lightning.mode(combined) == "sequential" and loop.num_dataloaders > 1
        self.is_current = False
        self.resolve()

    def resolve(self) -> None:
        """Make the choices that do not change from batch to batch."""
        hooks = self.hooks
        hooks.resolve()
        self.move = batch_mover(hooks)
        self.plain = hooks.step_is_the_modules(self.step_name)
        self.writes = any(isinstance(callback, BasePredictionWriter) for callback in hooks.callbacks)
        step = getattr(hooks.module, self.step_name)
        self.takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)

    def begin(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        """Move the batch to the device.

        Returns:
            The arguments of the batch hooks: the batch, its index and, with several loaders, the loader's index.
        """
        if not self.is_current and self.hooks.stale():
            self.resolve()
        self.is_current = False
        batch = self.move(batch, dataloader_idx)
        return (batch, batch_idx, dataloader_idx) if self.names_loader else (batch, batch_idx)

    def step(self, args: tuple[Any, ...]) -> Any:
        """Call the module's step, through the strategy if the strategy overrides it."""
        hooks, state = self.hooks, self.hooks.state
        if not self.takes_index:
            args = (args[0], *args[2:])
        before = state["_current_fx_name"]
        state["_current_fx_name"] = self.step_name
        output = getattr(hooks.module if self.plain else hooks.strategy, self.step_name)(*args)
        state["_current_fx_name"] = before
        return output


def step_plan(loop: EvaluationLoop | PredictionLoop) -> StepPlan | None:
    """Plan the lean steps of a loop that was just reset; None if Lightning's own steps must run."""
    fetcher = of_lightning.data_fetcher(loop)
    assert fetcher is not None
    if not may_be_lean(loop.trainer):
        return None
    of_lightning.fetch_unprofiled(fetcher)
    return None if isinstance(fetcher, DataLoaderIterDataFetcher) else StepPlan(loop)


def run_step(loop: Any, plan: StepPlan, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
    """Run one step of validation, test or prediction, with Lightning's hooks and counters in Lightning's order."""
    hooks, results, connector = plan.hooks, plan.results, plan.connector
    total: Any = loop.batch_progress.total
    current: Any = loop.batch_progress.current
    args = plan.begin(batch, batch_idx, dataloader_idx)
    if plan.contract.stands_in():
        plan.step(args)
        return
    total.ready += 1
    current.ready += 1
    if results is not None:
        connector.start_batch(results, args[0], dataloader_idx if plan.names_loader else None)
    writes = plan.writes and of_lightning.store_data_for_prediction_writer(loop)(batch_idx, dataloader_idx)
    if plan.start_name in hooks.work:
        hooks.call(plan.start_name, *args)
    total.started += 1
    current.started += 1
    output = plan.step(args)
    total.processed += 1
    current.processed += 1
    if hooks.stale():  # the step added or patched a hook
        plan.resolve()
    plan.is_current = plan.end_name not in hooks.work
    if not plan.is_current:
        hooks.call(plan.end_name, output, *args)
    if results is not None:
        connector.finish_batch(results)
    total.completed += 1
    current.completed += 1
    if results is not None:
        _end_evaluated(loop, plan, dataloader_idx)
        return
    if output is None:
        of_lightning.warning_cache(loop).warn("predict returned None if it was on purpose, ignore this warning...")
    if loop.return_predictions or writes:
        of_lightning.predictions(loop)[dataloader_idx].append(to_cpu(output))


def _end_evaluated(loop: EvaluationLoop, plan: StepPlan, dataloader_idx: int) -> None:
    trainer = loop.trainer
    if not plan.sanity_checks:
        seen = of_lightning.seen_batches_per_dataloader(loop)
        if plan.results.logs_steps:
            plan.connector.update_eval_step_metrics(seen[dataloader_idx])
        seen[dataloader_idx] += 1
    # the trainer's own property checks the stage first, which costs several times as much
    if (
        of_lightning.signal_connector(trainer).received_sigterm
        and not loop.batch_progress.is_last_batch
        and trainer.received_sigterm
    ):
        raise SIGTERMException


def validation_may_be_due(loop: TrainingEpochLoop) -> bool:
    """Whether Lightning must decide about validation: at the last batch, on a stop, at an interval, after a restart."""
    trainer: Any = loop.trainer
    if loop.batch_progress.is_last_batch or trainer.should_stop or of_lightning.skip_next_val(loop):
        return True
    every = trainer.val_check_batch
    if of_lightning.val_check_time_interval(trainer) is not None or every is None:
        return True
    if every == float("inf"):
        every = trainer.limit_train_batches
        if not isinstance(every, int) or not every:
            return False
        return (loop.batch_idx + 1) % every == 0
    ready = loop.batch_progress.current if trainer.check_val_every_n_epoch is not None else loop.batch_progress.total
    return ready.ready % every == 0
