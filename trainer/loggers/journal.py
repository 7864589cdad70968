"""Log to TensorBoard and CSV: checkpoints store where files end, and a run that goes on cuts them back."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import pytorch_lightning as pl
import pytorch_lightning.loggers as pl_loggers
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from ...strategies import STRATEGIES
from ...strategies.core.options import Count

SUFFIX = ".evener"
"""How the names of event files end that are cut back to where a checkpoint was written that a run resumes."""
Ends: TypeAlias = Mapping[str, int]
"""Where files end, by path: rows of CSV files, bytes of event files."""
KEPT = (pl_loggers.CSVLogger, pl_loggers.TensorBoardLogger)
"""The loggers whose files are cut back."""
_decided = WeakSet[Any]()
"""The loggers whose files were cut back already, by this process or one that it started: what came since stays."""


_OUR_OWN = ("speed/", "device/", "balance/", "gradient/", "lr-")
"""Prefixes of tags that are not metrics of the module."""
_GROUPS = ("strategy", "module", "data")

_WORDS = {cls.__name__: word for word, cls in STRATEGIES.items()}


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


class TensorBoardLogger(pl_loggers.TensorBoardLogger):
    """Lightning's TensorBoard logger with one event file from the first step to the last test metric.

    Lightning's logger closes its file after `fit`, so that `test` opens a second one, and writes a placeholder
    `hp_metric`. Here the HPARAMS tab has the final values of the logged metrics. With this project's trainer a run that
    is resumed in its directory begins another file, and the earlier ones keep the points up to its checkpoint; one that
    starts anew there removes the files of earlier runs.

    Args:
        save_dir: directory of the event file.
        flush_secs: seconds between writes to the disk.
        log_graph: show the module's graph in the GRAPHS tab; the module must set `example_input_array`.
    """

    def __init__(self, save_dir: str | Path, flush_secs: Count = 30, log_graph: bool = False) -> None:
        options: dict[str, Any] = {"default_hp_metric": False, "flush_secs": flush_secs, "filename_suffix": SUFFIX}
        super().__init__(str(save_dir), name="", version="", log_graph=log_graph, **options)

    @property
    @override
    def log_dir(self) -> str:
        return self.save_dir

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: dict[str, Any] | None = None, step: int | None = None) -> None:
        """Keep the hyperparameters for the HPARAMS tab, which is written once the final metrics are known."""
        flat: Mapping[str, Any] = params if isinstance(params, Mapping) else vars(params)
        # metrics given here are not logged as scalars: they would add a point at step 0 to each metric's curve
        self.hparams = {**cast("dict[str, Any]", self.hparams), **flat}

    @rank_zero_only
    def log_text(self, name: str, text: str) -> None:
        """Show preformatted text under a title in the TEXT tab."""
        self.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))

    @rank_zero_only
    def log_final_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write the HPARAMS tab: the hyperparameters and the final metrics."""
        given = cast("dict[str, Any]", self.hparams)
        # without those of `save_hyperparameters` that the configuration has, too
        names = [name for name in given if not any(f"{group}/{name}" in given for group in _GROUPS)]
        writer = self.experiment._get_file_writer()
        # of `strategy/_target_` the tab shows `strategy`
        shown = {name: value for name, value in sorted(metrics.items()) if not name.startswith(_OUR_OWN)}
        for summary in hparams({name.removesuffix("/_target_"): _plain(given[name]) for name in names}, shown):
            writer.add_summary(summary)

    @override
    @rank_zero_only
    def save(self) -> None:
        """Do nothing: hyperparameters are in the event file and in `.hydra/config.yaml` already."""

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush all logged values to disk; the file stays open for a test after `fit`."""
        if self._experiment:
            self.experiment.flush()

    @rank_zero_only
    def close(self) -> None:
        """Close the event file, at the end of the run."""
        if self._experiment:
            self.experiment.close()
            self._experiment = None


def hyperparameters(cfg: DictConfig) -> dict[str, Any]:
    """Flatten the options that distinguish runs, and all overrides of the command line (`module.lr` as `module/lr`)."""
    values: dict[str, Any] = {key: str(cfg[key]) for key in ("devices", "precision", "seed")}
    for group in _GROUPS:
        options = cast("dict[str, Any]", OmegaConf.to_container(cfg[group])) if cfg.get(group) else {}
        name = str(options.pop("_target_", None)).rpartition(".")[2]
        values[f"{group}/_target_"] = _WORDS.get(name, name)  # not `module`: MLflow's files can't have `module/lr` then
        values |= {f"{group}/{key}": _plain(value) for key, value in options.items()}
    file = Path(cfg.run_dir) / ".hydra" / "overrides.yaml"
    words: Any = OmegaConf.load(file) if file.exists() else []
    for word in OverridesParser.create().parse_overrides([*map(str, words)]):
        name, given = word.key_or_group.replace(".", "/"), OmegaConf.select(cfg, word.key_or_group)
        if name not in values and given is not None and not OmegaConf.is_config(given):
            values[name] = _plain(given)
    return values


def _plain(value: Any) -> int | float | str:
    if isinstance(value, bool):
        return str(value).lower()  # torch writes True as the number 1
    return value if isinstance(value, (int, float, str)) else str(value)


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
    """Withdraw, once, what earlier processes have logged after `at` (of `ends`); other files may have been moved."""
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
