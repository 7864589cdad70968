"""Keep the files that loggers append to: checkpoints store where they end, and a run that goes on cuts them back.

Every process begins an event file of its own: TensorBoard may be reading in the one before, at its place.
"""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakSet

import pytorch_lightning as pl
import pytorch_lightning.loggers as pl_loggers
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from .tensorboard import SUFFIX, TensorBoardLogger

Ends: TypeAlias = Mapping[str, int]
"""Where files end, by path: rows of CSV files, bytes of event files."""
KEPT = (pl_loggers.CSVLogger, pl_loggers.TensorBoardLogger)
"""The loggers whose files are cut back."""
_decided = WeakSet[Any]()
"""The loggers whose files were cut back already, by this process or one that it started: what came since stays."""


class MetricsFile(ExperimentWriter):
    """Lightning's writer of `metrics.csv`, which can continue a file that another process has written."""

    def __init__(self, log_dir: str) -> None:
        self.num_rows = 0  # in the file, without those that `save` has yet to write
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
        keys, rows = self._read()
        if rows[num_rows : self.num_inherited]:
            del rows[num_rows : self.num_inherited]
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
        """Keep the rows that the file has already, which Lightning's deletes with a warning."""

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
            self._experiment = MetricsFile(self.log_dir)
        return self._experiment


def open_files(loggers: list[Any]) -> None:
    """Settle where loggers write before other processes start, each of which would choose a directory of its own."""
    for logger in loggers if getattr(rank_zero_only, "rank", 0) == 0 else []:
        if isinstance(logger, KEPT):
            _ = logger.version
        if isinstance(logger, pl_loggers.TensorBoardLogger):
            logger._kwargs.setdefault("filename_suffix", SUFFIX)
        if isinstance(logger, pl_loggers.CSVLogger):
            before: Any = logger._experiment
            own = type(before) is ExperimentWriter
            if own or (before is None and type(logger).experiment is pl_loggers.CSVLogger.experiment):
                logger._experiment = file = MetricsFile(logger.log_dir)
                if own:
                    file.metrics, file.hparams, file.num_inherited = before.metrics, before.hparams, 0
            if isinstance(logger.experiment, MetricsFile):
                logger.experiment.save()  # lest the processes of a script write it once more


def refresh_files(loggers: list[Any], trained: bool, others_wrote: bool) -> None:
    """Note after a call of the trainer, perhaps `fit`, what its files hold, perhaps of other processes."""
    for file in _files(loggers) if others_wrote else []:
        file.refresh()
    if trained:
        _decided.update(loggers)


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
    """Withdraw, once, what earlier processes have logged after `at`, what `ends` returned, or since a run's start.

    Files that are not among them are kept, since they may have been moved.
    """
    sizes = {os.path.basename(path): size for path, size in (at or {}).items()}
    for logger in [one for one in loggers if one not in _decided]:
        _decided.add(logger)
        for file in _files([logger]):
            rows = 0 if at is None else at.get(os.path.abspath(file.metrics_file_path))
            if rows is not None:
                file.keep_rows(rows)
        files = _events_of(logger)
        writer: Any = logger._experiment if files else None
        own = None if writer is None else Path(writer._get_file_writer().event_writer._file_name).name
        if not (isinstance(logger, TensorBoardLogger) if at is None else any(path.name in sizes for path in files)):
            continue
        for path in [path for path in files if path.name != own]:
            if size := min(sizes.get(path.name, 0), path.stat().st_size):
                os.truncate(path, size)
            else:
                path.unlink()


def go_on(loggers: list[Any], at: Ends) -> None:
    """Continue the files from where they ended, in this process or in one that has died."""
    for logger in (one for one in loggers if isinstance(one, KEPT)):
        writer: Any = logger._experiment
        if isinstance(logger, pl_loggers.CSVLogger):
            logger._experiment = MetricsFile(logger.log_dir)
        elif writer is not None:
            writer.close()
            logger._experiment = None
    _decided.clear()
    cut_back(loggers, at)


def _events_of(logger: Any) -> list[Path]:
    """The event files that runs have begun in a logger's folder, in the order in which TensorBoard reads them."""
    if not isinstance(logger, pl_loggers.TensorBoardLogger):
        return []
    return [path.absolute() for path in sorted(Path(logger.log_dir).glob(f"events.out.tfevents.*{SUFFIX}"))]


def _files(loggers: list[Any]) -> list[MetricsFile]:
    found = [getattr(logger, "_experiment", None) for logger in loggers]
    return [file for file in found if isinstance(file, MetricsFile)]
