"""Withdraw what loggers have written after the checkpoint that a run resumes: rows of files, points of TensorBoard."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from tensorboard.compat.proto import event_pb2 as event_pb2_module

# protobuf creates its classes at run time
event_pb2: Any = event_pb2_module


@runtime_checkable
class RowsFile(Protocol):
    """A file of rows, which a logger has as its experiment (`trainer/loggers/csv.py`)."""

    num_rows: int
    metrics_file_path: str

    def flush(self) -> None:
        """Write the rows logged so far to the disk."""

    def keep_rows(self, num_rows: int) -> None:
        """Remove the rows of earlier processes from a number on."""


def count(trainer: Any) -> dict[str, int]:
    """Write all logged rows to the disk and return their number by file; empty on ranks other than 0."""
    files = _files(trainer)
    for file in files:
        file.flush()
    return {_name(file): file.num_rows for file in files}


def withdraw(trainer: Any, counted: Mapping[str, int]) -> None:
    """Remove the rows that a run will log again.

    Args:
        counted: what `count` returned when the checkpoint was written that the run resumes, if it resumes one. The rows
            of a file that is not among them are kept: it may have been moved.
    """
    for file in _files(trainer):
        rows = 0 if trainer.ckpt_path is None else counted.get(_name(file))
        if rows is not None:
            file.keep_rows(rows)


def withdraw_later_points(trainer: pl.Trainer) -> None:
    """Tell TensorBoard to discard later points, which were written before this run was interrupted."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    logs = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    for log in logs if trainer.is_global_zero else []:
        writer: Any = log.experiment
        several = len(list(Path(log.log_dir).glob("events.out.tfevents.*"))) > 1
        if several or getattr(writer, "continues", False):
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            writer._get_file_writer().add_event(event_pb2.Event(session_log=started), step)


def _files(trainer: Any) -> list[RowsFile]:
    logs = trainer.loggers if trainer.is_global_zero else []
    found = [getattr(log, "_experiment", None) for log in logs]
    # by its class too: that of `fast_dev_run`, or a tracker's that is switched off, has any attribute
    return [file for file in found if isinstance(file, ExperimentWriter) and isinstance(file, RowsFile)]


def _name(file: RowsFile) -> str:
    return os.path.abspath(file.metrics_file_path)
