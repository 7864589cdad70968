"""Log to experiment trackers, each Lightning's with other defaults: one run per run directory, also after restarts."""

import hashlib
import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytorch_lightning.loggers as pl_loggers
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from ...strategies import ConfigError


def run_key(run_dir: str | Path) -> str:
    """A tracker's name for a run: 32 characters that a restarted run derives from its directory again."""
    return hashlib.md5(str(Path(run_dir).absolute()).encode(), usedforsecurity=False).hexdigest()


def run_name(run_dir: str | Path) -> str:
    """The name of a run to show: `<strategy>/<date_time>`."""
    return "/".join(Path(run_dir).absolute().parts[-2:])


def verify_installed(package: str, word: str) -> None:
    """Refuse a logger whose package is not installed."""
    if find_spec(package) is None:
        raise ConfigError(
            f"logger={word} needs the package {package}, which is not installed. Run pip install 'evener[{word}]', or "
            "choose logger=tensorboard or csv."
        )


class WandbLogger(pl_loggers.WandbLogger):
    """Lightning's logger for Weights & Biases, which continues the same run after a restart.

    Args:
        save_dir: the run directory; wandb writes below it, and the run's id is derived from it.
        offline: write to the disk only; `wandb sync` uploads it later.
        tags: of the run.
        notes: of the run.
        **kwargs: further arguments of Lightning's logger.
    """

    def __init__(
        self, save_dir: str, offline: bool = False, tags: Sequence[str] = (), notes: str | None = None, **kwargs: Any
    ) -> None:
        verify_installed("wandb", "wandb")
        resume = None if offline else "allow"
        chosen: dict[str, Any] = {"id": run_key(save_dir), "name": run_name(save_dir), "resume": resume}
        super().__init__(save_dir=save_dir, offline=offline, tags=list(tags), notes=notes, **{**chosen, **kwargs})


class MLFlowLogger(pl_loggers.MLFlowLogger):
    """Lightning's logger for MLflow, which continues the same run after a restart.

    Args:
        save_dir: the run directory; the run's id is kept in `mlflow_run_id` there.
        tags: of the run, each a tag whose value is `true`.
        notes: the run's description.
        **kwargs: further arguments of Lightning's logger.
    """

    def __init__(self, save_dir: str, tags: Sequence[str] = (), notes: str | None = None, **kwargs: Any) -> None:
        verify_installed("mlflow", "mlflow")
        if getattr(rank_zero_only, "rank", 0) > 0:
            # Lightning's makes a client on every rank, and each would create the tables of the database
            pl_loggers.Logger.__init__(self)
            self._initialized, self._log_model, self._checkpoint_callback = False, False, None
            self._run_id = self._experiment_id = None
            self._tracking_uri = str(kwargs.get("tracking_uri", ""))
            return
        described = {"mlflow.note.content": notes} if notes else {}
        self._id_file = Path(save_dir) / "mlflow_run_id"
        known = self._id_file.read_text(encoding="utf-8") if self._id_file.is_file() else None
        options: dict[str, Any] = {"run_name": run_name(save_dir), "run_id": known, **kwargs}
        super().__init__(tags={**dict.fromkeys(tags, "true"), **described}, **options)

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's client."""
        client = super().experiment
        if self._run_id is not None and not self._id_file.is_file():
            self._id_file.write_text(self._run_id, encoding="utf-8")
        return client


class CometLogger(pl_loggers.CometLogger):
    """Lightning's logger for Comet, which continues the same experiment after a restart.

    Args:
        save_dir: the run directory, from which the experiment's key is derived; offline, its archive is written there.
        tags: of the experiment.
        notes: of the experiment.
        **kwargs: further arguments of Lightning's logger.
    """

    def __init__(self, save_dir: str, tags: Sequence[str] = (), notes: str | None = None, **kwargs: Any) -> None:
        verify_installed("comet_ml", "comet")
        chosen: dict[str, Any] = {"experiment_key": run_key(save_dir), "name": run_name(save_dir)}
        chosen["offline_directory"] = save_dir
        super().__init__(**{**chosen, **kwargs})
        if tags:
            self.experiment.add_tags(list(tags))
        if notes:
            self.experiment.log_other("notes", notes)

    @override
    def _create_experiment(self) -> None:
        """Write an archive with `online=False`, where Lightning's disables the experiment: it would log nothing."""
        if self._online is False:
            self._comet_config = importlib.import_module("comet_ml").ExperimentConfig(**self._kwargs)
        super()._create_experiment()
