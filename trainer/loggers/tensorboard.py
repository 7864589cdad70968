"""Log to TensorBoard: one event stream per run, in the run directory."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import pytorch_lightning.loggers as pl_loggers
from lightning_fabric.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from ...strategies.core.private import of_torch
from ._event_file import ContinuingWriter
from .custom_scalars import layout
from .hparams import without_repetition


class TensorBoardLogger(pl_loggers.TensorBoardLogger):
    """Lightning's TensorBoard logger with one event file from the first step to the last test metric.

    Lightning's logger closes its file after `fit`, so that `test` opens a second one, and writes a placeholder
    `hp_metric`. Here the HPARAMS tab has the final values of the logged metrics, and a run that goes on in its
    directory continues its file.

    Args:
        save_dir: directory of the event file.
        flush_secs: seconds between writes to the disk.
    """

    def __init__(self, save_dir: str | Path, flush_secs: int = 30) -> None:
        super().__init__(save_dir=str(save_dir), name="", version="", default_hp_metric=False, flush_secs=flush_secs)
        self.differing: list[str] = []
        """Hyperparameters that distinguish this run from others; the HPARAMS tab lists them first."""

    @property
    @override
    def log_dir(self) -> str:
        return self.save_dir

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """torch's writer; on other ranks than 0 it does nothing."""
        if self._experiment is None:
            self._experiment = ContinuingWriter(self.log_dir, **self._kwargs)
        return self._experiment

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: dict[str, Any] | None = None, step: int | None = None) -> None:
        """Keep the hyperparameters for the HPARAMS tab, which is written once the final metrics are known."""
        flat: Mapping[str, Any] = params if isinstance(params, Mapping) else vars(params)
        # metrics given here are not logged as scalars: they would add a point at step 0 to each metric's curve
        self.hparams = {**cast("dict[str, Any]", self.hparams), **flat}

    @rank_zero_only
    def log_config(self, text: str) -> None:
        """Show the composed configuration in the TEXT tab.

        Args:
            text: the configuration as YAML.
        """
        self.log_text("config", text)

    @rank_zero_only
    def log_text(self, name: str, text: str) -> None:
        """Show preformatted text in the TEXT tab.

        Args:
            name: the title.
            text: the lines.
        """
        self.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))

    @rank_zero_only
    def log_layout(self, monitor: str | None) -> None:
        """Arrange the charts of the CUSTOM SCALARS tab.

        Args:
            monitor: the metric that decides which checkpoint is best.
        """
        self.experiment.add_custom_scalars(layout(monitor))

    @rank_zero_only
    def log_final_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write the HPARAMS tab: the hyperparameters and the final metrics.

        Args:
            metrics: final values by their logged names.
        """
        values = without_repetition(cast("dict[str, Any]", self.hparams))
        shown = {key: v if isinstance(v, (bool, int, float, str)) else str(v) for key, v in values.items()}
        experiment, start, end = hparams(shown, dict(metrics))
        put_first(experiment, self.differing)
        for summary in (experiment, start, end):
            self._writer.add_summary(summary)

    @property
    def _writer(self) -> Any:
        experiment = self.experiment
        assert isinstance(experiment, SummaryWriter)
        return of_torch.get_file_writer(experiment)()

    @override
    @rank_zero_only
    def save(self) -> None:
        """Do nothing: hyperparameters are in the event file and in `.hydra/config.yaml` already."""

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush all logged values to disk; the file stays open for a test after `fit`."""
        if self._experiment is not None:
            self.experiment.flush()

    @rank_zero_only
    def close(self) -> None:
        """Close the event file, at the end of the run."""
        if self._experiment is not None:
            self.experiment.close()
            self._experiment = None


def put_first(experiment: Any, names: Collection[str]) -> None:
    """Mark hyperparameters as differing between runs, so that TensorBoard lists them first.

    Args:
        experiment: torch's summary of an experiment; modified in place.
        names: names of the hyperparameters.
    """
    plugin_data: Any = getattr(plugin_data_pb2, "HParamsPluginData")  # noqa: B009  # made at run time
    for value in experiment.value:
        data = plugin_data.FromString(value.metadata.plugin_data.content)
        for info in data.experiment.hparam_infos:
            info.differs = info.name in names
        value.metadata.plugin_data.content = data.SerializeToString()
