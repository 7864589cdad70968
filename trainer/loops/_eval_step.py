"""Run one lean step of validation, test or prediction."""

from typing import Any

from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher
from pytorch_lightning.loops.prediction_loop import _PredictionLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from ...strategies.core.types import Batch
from ...strategies.registry import contract_of
from ._batch_fetch import OneLoader, batch_mover, fetch_unprofiled, to_cpu
from ._hook_plan import HookPlan, may_be_lean


class StepPlan:
    """The calls that a validation, test or prediction loop makes for each batch, resolved once per run.

    Args:
        loop: Lightning's loop, with its data set up.
    """

    def __init__(self, loop: _EvaluationLoop | _PredictionLoop) -> None:
        trainer, predicts = loop.trainer, isinstance(loop, _PredictionLoop)
        stage = "predict" if predicts else "test" if trainer.testing else "validation"
        self.connector: Any = trainer._logger_connector
        self.results: Any = None if predicts else loop._results
        self.step_name = f"{stage}_step"
        self.start_name, self.end_name = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        self.hooks = HookPlan(trainer, (self.start_name, self.end_name), getattr(trainer, "timed_bar", None))
        combined = loop._combined_loader
        assert combined is not None
        fetcher = loop._data_fetcher
        self.loader = OneLoader(fetcher) if fetcher is not None and OneLoader.fits(fetcher) else None
        self.sanity_checks = trainer.sanity_checking
        self.contract = contract_of(trainer.strategy)
        self.names_loader = combined._mode == "sequential" and loop.num_dataloaders > 1
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
        if self.hooks.stale():
            self.resolve()
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


def step_plan(loop: _EvaluationLoop | _PredictionLoop) -> StepPlan | None:
    """Plan the lean steps of a loop that was just reset; None if Lightning's own steps must run."""
    fetcher = loop._data_fetcher
    assert fetcher is not None
    if not may_be_lean(loop.trainer):
        return None
    fetch_unprofiled(fetcher)
    return None if isinstance(fetcher, _DataLoaderIterDataFetcher) else StepPlan(loop)


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
    writes = plan.writes and loop._store_data_for_prediction_writer(batch_idx, dataloader_idx)
    if plan.start_name in hooks.work:
        hooks.call(plan.start_name, *args)
    total.started += 1
    current.started += 1
    output = plan.step(args)
    total.processed += 1
    current.processed += 1
    if hooks.stale():
        plan.resolve()
    if plan.end_name in hooks.work:
        hooks.call(plan.end_name, output, *args)
    if results is not None:
        connector.finish_batch(results)
    total.completed += 1
    current.completed += 1
    if results is not None:
        _end_evaluated(loop, plan, dataloader_idx)
        return
    if output is None:
        loop._warning_cache.warn("predict returned None if it was on purpose, ignore this warning...")
    if loop.return_predictions or writes:
        loop._predictions[dataloader_idx].append(to_cpu(output))


def _end_evaluated(loop: _EvaluationLoop, plan: StepPlan, dataloader_idx: int) -> None:
    trainer = loop.trainer
    if not plan.sanity_checks:
        seen = loop._seen_batches_per_dataloader
        if plan.results.logs_steps:
            plan.connector.update_eval_step_metrics(seen[dataloader_idx])
        seen[dataloader_idx] += 1
    # the trainer's own property checks the stage first, which costs several times as much
    if (
        trainer._signal_connector.received_sigterm
        and not loop.batch_progress.is_last_batch
        and trainer.received_sigterm
    ):
        raise SIGTERMException


def validation_may_be_due(loop: _TrainingEpochLoop) -> bool:
    """Whether Lightning must decide about validation: at the last batch, on a stop, at an interval, after a restart."""
    trainer: Any = loop.trainer
    if loop.batch_progress.is_last_batch or trainer.should_stop or loop._skip_next_val:
        return True
    every = trainer.val_check_batch
    if trainer._val_check_time_interval is not None or every is None:
        return True
    if every == float("inf"):
        every = trainer.limit_train_batches
        if not isinstance(every, int) or not every:
            return False
        return (loop.batch_idx + 1) % every == 0
    ready = loop.batch_progress.current if trainer.check_val_every_n_epoch is not None else loop.batch_progress.total
    return ready.ready % every == 0
