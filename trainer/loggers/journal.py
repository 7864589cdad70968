"""Keep the files that loggers append to: checkpoints store where they end, and a run that goes on cuts them back.

| file | position | cut back |
|---|---|---|
| `metrics.csv` | rows | later ones are removed |
| event files | bytes | what follows is removed, and the files begun later |

Every process begins an event file of its own. TensorBoard may be reading in the one before, and must not find other
bytes at its place.
"""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import pytorch_lightning.loggers as pl_loggers
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from .tensorboard import SUFFIX, TensorBoardLogger, event_files

Ends: TypeAlias = Mapping[str, int]
"""Where files end, by path: rows of CSV files, bytes of event files."""
KEPT = (pl_loggers.CSVLogger, pl_loggers.TensorBoardLogger)
"""The loggers whose files are cut back."""
_decided = WeakKeyDictionary[Any, list[Path]]()
"""Event files of loggers that stay: a training run of this process, or of one that it started, decided about them."""


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
        keys, rows = self._read()
        try:
            self._write(fieldnames, rows)
        except OSError:
            self.metrics_keys = keys  # those of the file as it is: the next row with another one makes it anew
            raise

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


def open_files(loggers: list[Any]) -> None:
    """Settle where loggers write before other processes start, each of which would choose a directory of its own.

    Lightning's loggers get files that can be cut back, too; its CSV logger continues its file in a restarted process.
    What the script has logged is written, lest its processes write it once more.

    Args:
        loggers: the trainer's; only those of files are touched, and only on rank 0.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:
        return
    for logger in loggers:
        if isinstance(logger, KEPT):
            _ = logger.version
        if isinstance(logger, pl_loggers.TensorBoardLogger):
            logger._kwargs.setdefault("filename_suffix", SUFFIX)
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


def refresh_files(loggers: list[Any], trained: bool, others_wrote: bool) -> None:
    """Note after a call of the trainer what its files hold.

    Args:
        trained: whether it ran `fit`, and so decided about what earlier processes have logged.
        others_wrote: whether it did so in other processes, which have ended.
    """
    for file in _files(loggers) if others_wrote else []:
        file.refresh()
        file.num_inherited = 0 if trained else file.num_inherited
    for logger in loggers if getattr(rank_zero_only, "rank", 0) == 0 else []:
        if trained or logger in _decided:
            _decided[logger] = _events_of(logger)


def ends(trainer: pl.Trainer) -> dict[str, int]:
    """Write all that was logged to the disk, and say where each file ends; empty on ranks other than 0."""
    found: dict[str, int] = {}
    for logger in trainer.loggers if trainer.is_global_zero else []:
        if isinstance(logger, pl_loggers.TensorBoardLogger):
            logger.experiment.flush()
            found |= {str(path): path.stat().st_size for path in _events_of(logger)}
        for file in _files([logger]):
            file.save()
            found[os.path.abspath(file.metrics_file_path)] = file.num_rows
    return found


def cut_back(loggers: list[Any], at: Ends | None) -> None:
    """Withdraw what earlier processes have logged and this one will log again.

    Args:
        at: what `ends` returned when the checkpoint was written that the run resumes; None if it starts anew. A file
            of rows that is not among them is kept, since it may have been moved, and so are all event files if none is.
            Event files of Lightning's own logger are also kept if it starts anew.
    """
    for file in _files(loggers):
        rows = 0 if at is None else at.get(os.path.abspath(file.metrics_file_path))
        if rows is not None:
            file.keep_rows(rows)
    sizes = {os.path.basename(path): size for path, size in (at or {}).items()}
    for logger in loggers:
        files = _events_of(logger)
        writer: Any = logger._experiment if files else None
        own = None if writer is None else Path(writer._get_file_writer().event_writer._file_name).name
        cuts = isinstance(logger, TensorBoardLogger) if at is None else any(path.name in sizes for path in files)
        for path in files if cuts else []:
            if path.name == own or path in _decided.get(logger, ()):
                continue
            if size := min(sizes.get(path.name, 0), path.stat().st_size):
                os.truncate(path, size)
            else:
                path.unlink()


def go_on(loggers: list[Any], at: Ends) -> None:
    """Continue the files from where they ended, in this process or in one that has died."""
    for logger in (one for one in loggers if isinstance(one, KEPT)):
        writer: Any = logger._experiment
        if isinstance(logger, pl_loggers.CSVLogger):
            logger._experiment = MetricsFile(logger.log_dir, keep=True)
        elif writer is not None:
            writer.close()
            logger._experiment = None
    _decided.clear()
    cut_back(loggers, at)


def _events_of(logger: Any) -> list[Path]:
    found = event_files(logger.log_dir) if isinstance(logger, pl_loggers.TensorBoardLogger) else []
    return [path.absolute() for path in found]


def _files(loggers: list[Any]) -> list[MetricsFile]:
    found = [getattr(logger, "_experiment", None) for logger in loggers]
    return [file for file in found if isinstance(file, MetricsFile)]
