"""Continue the files that loggers append to: one file per run, cut back to where a checkpoint was that the run resumes.

Rows of CSV files are counted, and removed from a number on; TensorBoard is told from which step on points are void.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto import event_pb2 as event_pb2_module

from .csv import MetricsFile

# protobuf creates its classes at run time
event_pb2: Any = event_pb2_module


def open_files(loggers: list[Any]) -> None:
    """Settle where loggers write before other processes start, each of which would choose a directory of its own.

    Lightning's CSV logger gets a writer that can continue its file, too; in a restarted process it does so. What the
    script has logged is written, lest its processes write it once more.

    Args:
        loggers: the trainer's; only those of files are touched, and only on rank 0.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:
        return
    for logger in loggers:
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            _ = logger.version
        if not isinstance(logger, CSVLogger):
            continue
        before = logger._experiment
        if type(before) is ExperimentWriter:
            logger._experiment = file = MetricsFile(logger.log_dir, keep=True)
            file.metrics, file.hparams, file.num_inherited = before.metrics, before.hparams, 0
        elif before is None and type(logger).experiment is CSVLogger.experiment:
            restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
            logger._experiment = MetricsFile(logger.log_dir, keep=restarted)
        if isinstance(logger.experiment, MetricsFile):
            logger.experiment.save()


def refresh_files(loggers: list[Any], trained: bool) -> None:
    """Read what the processes that have ended wrote to the files of CSV loggers.

    Args:
        loggers: the trainer's.
        trained: whether the processes ran `fit`, and so decided about the rows of earlier runs.
    """
    for file in _files(loggers):
        file.refresh()
        file.num_inherited = 0 if trained else file.num_inherited


def positions(trainer: pl.Trainer) -> dict[str, int]:
    """Write all logged rows to the disk and return their number by file; empty on ranks other than 0."""
    files = _files(trainer.loggers if trainer.is_global_zero else [])
    for file in files:
        file.save()
    return {os.path.abspath(file.metrics_file_path): file.num_rows for file in files}


def cut_back(trainer: pl.Trainer, counted: Mapping[str, int]) -> None:
    """Withdraw what a run will log again: rows of files, and TensorBoard's points after its present step.

    Args:
        counted: what `positions` returned when the checkpoint was written that the run resumes, if it resumes one. The
            rows of a file that is not among them are kept: it may have been moved.
    """
    loggers = trainer.loggers if trainer.is_global_zero else []
    for file in _files(loggers):
        rows = 0 if trainer.ckpt_path is None else counted.get(os.path.abspath(file.metrics_file_path))
        if rows is not None:
            file.keep_rows(rows)
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for log in (logger for logger in loggers if isinstance(logger, TensorBoardLogger)):
        writer: Any = log.experiment
        several = len(list(Path(log.log_dir).glob("events.out.tfevents.*"))) > 1
        if several or getattr(writer, "continues", False):
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            writer._get_file_writer().add_event(event_pb2.Event(session_log=started), step)


def _files(loggers: list[Any]) -> list[MetricsFile]:
    found = [getattr(logger, "_experiment", None) for logger in loggers]
    return [file for file in found if isinstance(file, MetricsFile)]
