"""Run a job in one process: configuration → objects → fit, validate, test or predict → result."""

import os
import sys
import traceback
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import LearningRateMonitor, ModelSummary, ProgressBar
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from rich.console import Console

from ...strategies import ConfigError
from ...strategies.core import rng
from ...strategies.core.files import replacing
from ...strategies.core.patching import replaced
from ...strategies.distributed import survivors
from ...strategies.registry import name_of, node_devices, processes_of, stop_signal_of
from ..callbacks import EpochLines, LearningRateFinder, LogEveryEpoch, RunSummary, StartUp
from ..checkpoint import Checkpoint
from ..checkpoint.checkpoint_io import move_to_disk, saved_in_memory
from ..checkpoint.file_io import find_best, find_newest, good_or_newest
from ..config.checks import AUTO, entries, instantiate, module_and_data, quiet_trainer, verify_target
from ..loggers.journal import TensorBoardLogger, hyperparameters
from .log_file import Interrupted, graceful_stop, report, run_log, tell_stop
from .result import DIVERGED, FINISHED, Result, WorkerError, environment

OF_NAME = {"last": find_newest, "best": find_best}
"""How the checkpoint is found for the values of `resume` that search the runs of a name."""


@dataclass
class Parts:
    """The objects of a run, built from the configuration."""

    trainer: pl.Trainer
    module: pl.LightningModule
    data: pl.LightningDataModule | None
    summary: RunSummary

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the best checkpoint; None if none was kept."""
        return getattr(self.trainer.checkpoint_callback, "best_model_path", None) or None


@dataclass(frozen=True)
class Run:
    """A run of a resolved configuration, as the process of a rank executes it."""

    cfg: DictConfig
    rank: int = 0
    num_processes: int = 1

    def execute(self) -> Result:
        """Run `cfg.mode`; what ends it is told once, in the run's log and in `result.json`.

        Raises:
            WorkerError: this rank failed after another, whose process tells the reason; or the user's code ended it by
                what is no error, such as `sys.exit()`.
        """
        with run_log(self.cfg.run_dir, self.rank):
            try:
                return run(self.cfg)
            except Interrupted as exc:
                tell_stop(exc)
                raise
            except KeyboardInterrupt:  # a second Ctrl-C; Lightning's loops let no other one through
                raise
            except BaseException as exc:
                rank = self.rank if survivors.own is None else survivors.own.rank  # it may have taken another's place
                failed, is_first = report(self.cfg, rank, self.num_processes, exc)
                if not is_first:
                    raise WorkerError(f"rank {rank} failed too: {failed.reason}", failed.trace) from exc
                if isinstance(exc, Exception):
                    raise
                code = exc.code if isinstance(exc, SystemExit) else None
                status = code if isinstance(code, int) and code else 1
                raise WorkerError(failed.told, failed.trace, rank, status) from exc


def run(cfg: DictConfig) -> Result:
    """Run `cfg.mode` of a resolved configuration in this process."""
    if OmegaConf.select(cfg, "extras.ignore_warnings"):
        warnings.filterwarnings("ignore")
    if cfg.seed is not None:
        # torch notes, for each kind of device, from where it was seeded, which reads the source of every frame
        with replaced(traceback, "format_stack", list):
            pl.seed_everything(cfg.seed, workers=True)
    checkpoint = starting_checkpoint(cfg)
    for key, own in entries("callbacks", cfg.get("callbacks")):
        if key != "callbacks" and issubclass(verify_target(key, own, pl.Callback), LearningRateFinder):
            cfg = with_learning_rate(cfg, key.removeprefix("callbacks."), checkpoint)
    parts = build(cfg)
    trainer = parts.trainer
    started_in = environment(node_devices(trainer.strategy)) if trainer.is_global_zero else {}
    log_config(trainer, cfg)
    with graceful_stop(trainer):
        metrics, predictions = work(parts, cfg, checkpoint)
    result = replace(collect(parts, cfg, metrics), predictions=predictions, started_from=checkpoint)
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                best = {} if result.monitored is None else {cfg.monitor: result.monitored}
                logger.log_final_metrics(result.metrics | best)
                logger.close()
        result = replace(result, environment=started_in)
        result.write()
    return result


def starting_checkpoint(cfg: DictConfig) -> str | None:
    """Find the checkpoint to start from: after a restart the run's own newest, otherwise the one of `resume`."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted or cfg.resume == AUTO:
        # a run on one machine may have its snapshot in memory
        newest = find_newest(cfg.run_dir, saved_in_memory(checkpoint_folder(cfg)) if cfg.num_nodes == 1 else None)
        if newest is not None:
            rank_zero_info(f"Restarted: continuing from {newest}")
            return str(newest)
    if cfg.resume in OF_NAME:
        return str(checkpoint_of_name(cfg))
    if cfg.resume in (None, AUTO):
        return None
    return str(good_or_newest(cfg.resume)) if cfg.mode == "fit" else cfg.resume


def checkpoint_of_name(cfg: DictConfig) -> Path:
    """Find the checkpoint of the runs of this name that `resume=last` or `best` means."""
    home = Path(cfg.log_dir) / cfg.name
    if (found := OF_NAME[cfg.resume](home)) is not None:
        return found
    ranked = " that says which is the best, as those of checkpoint=best do" if cfg.resume == "best" else ""
    raise ConfigError(
        f"resume={cfg.resume}: no checkpoint found under {home}{ranked}. Train first, or give resume=<path>."
    )


def with_learning_rate(cfg: DictConfig, name: str, checkpoint: str | None) -> DictConfig:
    """Search for the learning rate by a callback, taken out of the run's own; a run that goes on keeps its rate."""
    found = cfg.copy()
    options = found.callbacks.pop(name)
    if cfg.mode != "fit" or checkpoint is not None or cfg.trainer.get("fast_dev_run"):
        rank_zero_info("lr_finder is skipped: the run does not begin a training of its own.")
        return found
    finder: LearningRateFinder = instantiate(f"callbacks.{name}", {**options, "update": False})
    if options.get("update") and finder.key not in cfg.module:
        raise ConfigError(
            f"callbacks.{name}.update=true needs the module's learning rate in the configuration, and module has "
            f"no option {finder.key}. Add it to the module's file, or give its name: callbacks.{name}.key=..."
        )
    finder._early_exit = True  # as Lightning's Tuner has it: the search alone
    whole: dict[str, Any] = {"max_epochs": -1, "check_val_every_n_epoch": sys.maxsize}
    with rng.isolated():
        module, data = module_and_data(cfg)
        quiet_trainer(cfg, callbacks=[finder], accumulate_grad_batches=1, **whole).fit(module, datamodule=data)
    rate = None if finder.optimal_lr is None else finder.optimal_lr.suggestion()
    if options.get("update") and rate is not None:
        rank_zero_info(f"lr_finder: module.{finder.key}={rate:.3g}")
        found.module[finder.key] = rate
    return found


def checkpoint_folder(cfg: DictConfig) -> str | None:
    """The directory of the run's checkpoints, if it writes any."""
    return (cfg.get("checkpoint") or {}).get("dirpath")


def keep_snapshot(cfg: DictConfig) -> None:
    """Move what a run that has failed has left in memory to the disk."""
    move_to_disk(checkpoint_folder(cfg))


def build(cfg: DictConfig) -> Parts:
    """Instantiate the objects that the configuration names."""
    strategy = instantiate("strategy", cfg.strategy)
    module, data = module_and_data(cfg)
    if cfg.compile:
        module.compile()
    loggers: list[Logger] = [instantiate(key, options) for key, options in entries("logger", cfg.get("logger"))]
    summary, options = RunSummary(), cfg.trainer
    callbacks: list[pl.Callback] = [
        summary,  # first, since others read its clock
        *(instantiate(key, own) for key, own in entries("callbacks", cfg.get("callbacks"))),
        *([instantiate("checkpoint", cfg.checkpoint)] if cfg.get("checkpoint") else []),
        LogEveryEpoch(), StartUp(cfg.run_dir),
        *([EpochLines()] if options.get("enable_progress_bar", True) else []),
    ]  # fmt: skip
    if options.get("enable_model_summary", True) and not any(isinstance(one, ModelSummary) for one in callbacks):
        callbacks.append(ModelSummary())
    console = Console()
    draws = console.is_terminal or console.is_jupyter  # otherwise nothing can draw a progress bar
    useless = (*(() if draws else (ProgressBar,)), *(() if loggers else (LearningRateMonitor,)))  # which refuses
    trainer = instantiate(
        "trainer", options, strategy=strategy, logger=loggers or False,
        enable_checkpointing=bool(cfg.get("checkpoint")), enable_model_summary=False,
        callbacks=[one for one in callbacks if not isinstance(one, useless)],
        **({} if draws else {"enable_progress_bar": False}),
    )  # fmt: skip
    return Parts(trainer, module, data, summary)


def log_config(trainer: pl.Trainer, cfg: DictConfig, again: bool = False) -> None:
    """Send the hyperparameters to every logger, and the whole configuration as text to TensorBoard; on rank 0 only."""
    if survivors.own is not None and not again:
        survivors.own.when_first.append(partial(log_config, trainer, cfg, again=True))
    for logger in trainer.loggers if trainer.is_global_zero else ():
        logger.log_hyperparams(hyperparameters(cfg))
        if isinstance(logger, TensorBoardLogger) and not again:  # then it is in the file
            told = [*cfg.tags, *([cfg.notes] if cfg.notes else [])]
            for name, text in (("config", OmegaConf.to_yaml(cfg)), ("notes", "\n".join(told))):
                if text:
                    logger.log_text(name, text)


def work(parts: Parts, cfg: DictConfig, checkpoint: str | None) -> tuple[dict[str, float], str | None]:
    """Run the trainer in the configured mode; return the final metrics, and the path of predictions, if any."""
    trainer, module, data = parts.trainer, parts.module, parts.data
    if checkpoint is None and cfg.mode != "fit":
        rank_zero_info(f"mode={cfg.mode} without resume: the module keeps its initial weights.")
    try:
        if cfg.mode == "fit":
            return fit(parts, cfg, checkpoint), None
        if cfg.mode == "predict":
            outputs = trainer.predict(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
            return {}, write_predictions(trainer, cfg.run_dir, outputs)
        evaluate = trainer.validate if cfg.mode == "validate" else trainer.test
        evaluate(module, datamodule=data, ckpt_path=checkpoint, verbose=False, weights_only=True)
    except RuntimeError as exc:
        if checkpoint is None or "loading state_dict for" not in str(exc):
            raise
        _, *lines = [line.strip().rstrip(". ") for line in str(exc).splitlines() if line.strip()]
        raise ConfigError(
            f"resume={checkpoint} does not fit the module: {lines[0] if lines else exc}. Give the module the options "
            "that it was trained with, or add config=run, which takes them from that run."
        ) from exc
    return final_metrics(trainer), None


def fit(parts: Parts, cfg: DictConfig, checkpoint: str | None) -> dict[str, float]:
    """Train, then test the best checkpoint, or the final weights if none was kept."""
    trainer, module, data = parts.trainer, parts.module, parts.data
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except KeyError as exc:
        if checkpoint is None or "contains only the model" not in str(exc):
            raise
        raise ConfigError(
            f"resume={checkpoint} contains only weights (checkpoint.save_weights_only=true), and mode=fit needs the "
            "full training state. Give another checkpoint; mode=test, validate and predict accept this one."
        ) from exc
    if trainer.num_training_batches == 0 and trainer.limit_train_batches != 0:
        raise ConfigError(
            "Nothing was trained: the training loader is empty. Give it samples; with drop_last=True, at least "
            "batch_size of them."
        )
    loop: Any = trainer.fit_loop.epoch_loop
    if 0 < getattr(loop.automatic_optimization, "num_none", 0) == loop.batch_progress.total.started:
        raise ConfigError(
            "Nothing was trained: training_step returned None for every batch, so no optimizer step was taken. Return "
            "the loss; if training_step steps the optimizers itself, set automatic_optimization=False in the module."
        )
    if trainer._signal_connector.received_sigterm or stop_signal_of(trainer.strategy) is not None:
        raise SIGTERMException  # received after the last step: training is complete, and nothing follows it
    metrics = final_metrics(trainer)
    tested = is_overridden("test_step", module) and is_overridden("test_dataloader", data or module)
    if cfg.test_after_fit and tested and not trainer.interrupted:
        trainer.test(module, datamodule=data, ckpt_path=parts.best_checkpoint, verbose=False, weights_only=True)
        metrics |= final_metrics(trainer)
    return metrics


def final_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Read every logged metric's last value."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def write_predictions(trainer: pl.Trainer, run_dir: str, outputs: Any) -> str | None:
    """Write the outputs of `predict_step` atomically, batch by batch in the loader's order."""
    if not trainer.is_global_zero:
        return None
    path = Path(run_dir) / "predictions.pt"
    with replacing(path) as temporary:
        torch.save(outputs, temporary)
    return str(path)


def collect(parts: Parts, cfg: DictConfig, metrics: dict[str, float]) -> Result:
    """Assemble the result."""
    trainer, strategy, summary = parts.trainer, parts.trainer.strategy, parts.summary
    monitored, epoch, ranks = metrics.get(cfg.monitor), None, trainer.checkpoint_callback
    if isinstance(ranks, Checkpoint) and cfg.mode == "fit" and ranks.monitor == cfg.monitor:
        score: Any = ranks.best_model_score  # untyped; of the best checkpoint
        monitored, epoch = (monitored, None) if score is None else (float(score), ranks.best_epoch)
    return Result(
        cfg.mode, name_of(strategy), list(map(str, node_devices(strategy))), processes_of(strategy), cfg.run_dir,
        metrics, cfg.monitor, monitored, epoch, summary.global_batch, summary.samples_per_s, trainer.global_step,
        best_checkpoint=parts.best_checkpoint,
        last_checkpoint=getattr(ranks, "last_model_path", None) or parts.best_checkpoint,
        peak_memory_mib=summary.peak_memory_mib, status=DIVERGED if summary.diverged else FINISHED,
    )  # fmt: skip
