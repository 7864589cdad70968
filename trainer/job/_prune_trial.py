"""Report the monitored metric of a trial to Optuna, and end the trial if Optuna's pruner says so."""

import importlib
import math
from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

PRUNED_AT = "pruned_at"
"""The attribute of a pruned trial: the validation after which it ended."""


class PruneTrial(pl.Callback):
    """End a trial of a search for hyperparameters whose monitored metric is worse than the other trials'.

    Rank 0 reports the metric after every validation and decides for all ranks.

    Args:
        storage: where Optuna keeps the trials.
        study: name of the search.
        number: the trial's number.
        monitor: name of the metric.
        pruner: Optuna's pruner; None only reports.
    """

    def __init__(self, storage: str, study: str, number: int, monitor: str, pruner: Any = None) -> None:
        self.storage, self.study, self.number = storage, study, number
        self.monitor, self.pruner = monitor, pruner
        self.num_reported = 0
        self._trial: Any = None

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the metric, and stop training if the trial is pruned."""
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or value is None:
            return
        ends = self.report(float(value)) if trainer.is_global_zero else False
        trainer.should_stop = trainer.should_stop or bool(trainer.strategy.broadcast(ends))

    def report(self, value: float) -> bool:
        """Report a value, and return whether the trial is to end."""
        trial = self._trial = self._trial or self._load()
        trial.report(value, step=self.num_reported)
        self.num_reported += 1
        ends = self.pruner is not None and (math.isnan(value) or bool(trial.should_prune()))
        if ends:
            trial.set_user_attr(PRUNED_AT, self.num_reported)
        return ends

    def _load(self) -> Any:
        optuna = importlib.import_module("optuna")
        study = optuna.load_study(study_name=self.study, storage=open_storage(self.storage), pruner=self.pruner)
        return optuna.Trial(study, study.trials[self.number]._trial_id)


def open_storage(storage: str) -> Any:
    """Open what keeps a search's trials: a file that several processes may write, or a database."""
    if "://" in storage:
        return storage
    storages = importlib.import_module("optuna.storages")
    backend = importlib.import_module("optuna.storages.journal").JournalFileBackend(storage)
    return storages.JournalStorage(backend)
