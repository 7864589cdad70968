"""Continue the files that loggers append to: one file per run, cut back to where a checkpoint was that the run resumes.

Rows of CSV files are counted, and removed from a number on; TensorBoard is told from which step on points are void.
"""

import csv
import io
import os
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.loggers as pl_loggers
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto import event_pb2 as event_pb2_module
from typing_extensions import override

from ...strategies.distributed.store import RankError
from .tensorboard import TensorBoardLogger, event_files


class MetricsFile(ExperimentWriter):
    """Lightning's writer of `metrics.csv`, which can continue a file that another process has written.

    Lightning's keeps the columns in memory only. In a restarted process it deletes the file, and in a process that was
    forked from the script before another one wrote the file it fails, because it does not know the columns.

    Args:
        log_dir: directory of the file.
        keep: whether to keep the rows that the file has already; Lightning's writer deletes them with a warning.

    Attributes:
        num_rows: rows in the file, without those that `save` has yet to write.
        num_inherited: rows that were there when the writer was created, until a training run decides about them.
    """

    def __init__(self, log_dir: str, keep: bool) -> None:
        self._keep = keep
        self.num_rows = 0
        super().__init__(log_dir)
        self.refresh()
        self.num_inherited = self.num_rows

    def refresh(self) -> None:
        """Read the file's columns and count its rows: another process may have written it in the meantime."""
        self.metrics_keys, rows = self._read()
        self.num_rows = len(rows)

    def keep_rows(self, num_rows: int) -> None:
        """Remove the inherited rows from a number on; rows that were logged since stay."""
        self.save()
        dropped = slice(num_rows, max(num_rows, self.num_inherited))
        self.num_inherited = 0
        keys, rows = self._read()
        if rows[dropped]:
            del rows[dropped]
            self._write(keys, rows)
            self.num_rows = len(rows)

    @override
    def save(self) -> None:
        num_new = len(self.metrics)
        super().save()
        self.num_rows += num_new

    @override
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._write(fieldnames, self._read()[1])

    @override
    def _check_log_dir_exists(self) -> None:
        if not self._keep:
            super()._check_log_dir_exists()

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Read columns and rows; an incomplete last row, which a killed process left, is removed from the file."""
        if not self._fs.isfile(self.metrics_file_path):
            return [], []
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            text = str(file.read())
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        keys, rows = list(reader.fieldnames or []), list(reader)
        if whole != text:
            self._write(keys, rows)
        return keys, rows

    def _write(self, keys: list[str], rows: list[dict[str, Any]]) -> None:
        """Replace the file, so that a process killed meanwhile leaves the old or the new one."""
        temporary = f"{self.metrics_file_path}.tmp"
        with self._fs.open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=keys)
            writer.writeheader()
            writer.writerows(rows)
        self._fs.mv(temporary, self.metrics_file_path)


class CSVLogger(pl_loggers.CSVLogger):
    """Lightning's CSV logger, which continues the `metrics.csv` of a restarted run and of other processes of a script.

    With this project's trainer a training run that is resumed in the directory of its file keeps the rows up to its
    checkpoint, as the later ones are logged again; one that starts anew there removes all earlier rows. The arguments
    are Lightning's.
    """

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file."""
        if self._experiment is None:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = MetricsFile(self.log_dir, keep=True)
        return self._experiment


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
        if isinstance(logger, (pl_loggers.CSVLogger, pl_loggers.TensorBoardLogger)):
            _ = logger.version
        if not isinstance(logger, pl_loggers.CSVLogger):
            continue
        before = logger._experiment
        if type(before) is ExperimentWriter:
            logger._experiment = file = MetricsFile(logger.log_dir, keep=True)
            file.metrics, file.hparams, file.num_inherited = before.metrics, before.hparams, 0
        elif before is None and type(logger).experiment is pl_loggers.CSVLogger.experiment:
            restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
            logger._experiment = MetricsFile(logger.log_dir, keep=restarted)
        if isinstance(logger.experiment, MetricsFile):
            logger.experiment.save()


def refresh_files(loggers: list[Any], trained: bool) -> None:
    """Read what the processes that have ended wrote to the files of CSV loggers.

    Args:
        trained: whether the processes ran `fit`, and so decided about the rows of earlier runs.
    """
    for file in _files(loggers):
        file.refresh()
        file.num_inherited = 0 if trained else file.num_inherited


def positions(trainer: pl.Trainer) -> dict[str, int]:
    """Write all that was logged to the disk, and say where each file ends; empty on ranks other than 0.

    Returns:
        Rows of CSV files, bytes of event files, by path.
    """
    found: dict[str, int] = {}
    for logger in trainer.loggers if trainer.is_global_zero else []:
        if isinstance(logger, TensorBoardLogger):
            writer: Any = logger.experiment
            writer.flush()
            path = writer._get_file_writer().event_writer._file_name
            found[os.path.abspath(path)] = os.path.getsize(path)
        for file in _files([logger]):
            file.save()
            found[os.path.abspath(file.metrics_file_path)] = file.num_rows
    return found


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
    for log in (logger for logger in loggers if isinstance(logger, pl_loggers.TensorBoardLogger)):
        writer: Any = log.experiment
        several = len(event_files(log.log_dir)) > 1
        if several or getattr(writer, "continues", False):
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            writer._get_file_writer().add_event(event_pb2.Event(session_log=started), step)


def go_on(loggers: list[Any], at: Mapping[str, int]) -> None:
    """Continue the files of a process that has died, where they ended by its `positions`.

    Raises:
        RankError: a logger has no such file.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            path = os.path.abspath(event_files(logger.log_dir)[-1])
            os.truncate(path, at[path])
        elif isinstance(logger, pl_loggers.CSVLogger):
            logger._experiment = file = MetricsFile(logger.log_dir, keep=True)
            file.keep_rows(at[os.path.abspath(file.metrics_file_path)])
        else:
            raise RankError(f"{type(logger).__name__} can't be continued by another process.")


def _files(loggers: list[Any]) -> list[MetricsFile]:
    found = [getattr(logger, "_experiment", None) for logger in loggers]
    return [file for file in found if isinstance(file, MetricsFile)]
