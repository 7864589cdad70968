"""Log to `metrics.csv`, and continue the file in every process that a run writes it from."""

import csv
import io
from typing import Any

import pytorch_lightning.loggers as pl_loggers
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment
from typing_extensions import override


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
        """Remove the inherited rows from a number on; rows that were logged since stay.

        Args:
            num_rows: number of rows, from the first, that belong to the run.
        """
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
