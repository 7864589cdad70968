"""When checkpoints are saved and what they are called; finding the newest one."""

import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from ..strategies.exceptions import ConfigError

SUFFIX = ".ckpt"


def find_newest(directory: str | Path) -> Path | None:
    """Find the newest checkpoint of an experiment.

    Args:
        directory: searched with all its subdirectories, so that one directory may hold several runs.

    Returns:
        The checkpoint written last, or None where there is none.
    """
    found = (path for path in Path(directory).rglob(f"*{SUFFIX}") if path.is_file())
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


class Checkpoint(ModelCheckpoint):
    """Save checkpoints during training: the best ones, the last one, or both.

    One trigger at most may be given; without any, a checkpoint is considered after every epoch. Names match
    `[A-Za-z0-9._-]+`, so that a path can be passed as a Hydra override and a metric called `val/loss` makes no
    directory.

    Args:
        dirpath: directory of the files. None takes the logger's, as Lightning does.
        filename: name without suffix; `{epoch}`, `{step}` and the names of logged metrics are filled in.
        monitor: name of the logged metric by which the best are chosen; None keeps the newest instead.
        mode: `min` or `max`: which value of `monitor` is the best.
        save_top_k: number of files kept as the best; 0 keeps none, -1 keeps all.
        save_last: also keep `last.ckpt`, always the state saved last.
        every_n_steps: number of optimizer steps between checkpoints.
        every_n_epochs: number of epochs between checkpoints.
        interval_s: seconds of training between checkpoints.
        save_weights_only: leave out all that only resuming needs.
        verbose: log a line for each checkpoint that is compared.

    Raises:
        ConfigError: more than one trigger is given.
    """

    CHECKPOINT_EQUALS_CHAR = "_"

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "epoch{epoch:03d}-step{step:06d}",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        interval_s: float | None = None,
        save_weights_only: bool = False,
        verbose: bool = False,
    ) -> None:
        triggers = {"every_n_steps": every_n_steps, "every_n_epochs": every_n_epochs, "interval_s": interval_s}
        given = [f"{name}={value}" for name, value in triggers.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                f"checkpoint: {' and '.join(given)} were given and one callback takes one trigger. "
                "Set the others to null, or add a second Checkpoint callback."
            )
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            every_n_train_steps=every_n_steps,
            every_n_epochs=every_n_epochs,
            train_time_interval=None if interval_s is None else timedelta(seconds=interval_s),
            save_weights_only=save_weights_only,
            verbose=verbose,
            auto_insert_metric_name=False,
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            # A resumed run continues in its own directory.
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Best scores stay comparable when a run is resumed into a new directory; Lightning would forget them.
        super().load_state_dict({**state_dict, "dirpath": self.dirpath})

    @override
    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: dict[str, Tensor],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        name = super()._format_checkpoint_name(filename, metrics, prefix, auto_insert_metric_name)
        return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".-")

    @override
    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: pl.Trainer, del_filepath: str | None = None
    ) -> str:
        # A file of the same name that is not among the best was left by a killed run at this very step.
        path = self.format_checkpoint_name(monitor_candidates)
        version = self.STARTING_VERSION
        while path in self.best_k_models and path != del_filepath:
            path = self.format_checkpoint_name(monitor_candidates, ver=version)
            version += 1
        return path

    @override
    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_last:
            self.last_model_path = self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST)
            self._save_checkpoint(trainer, self.last_model_path)

    @override
    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        assert self.dirpath is not None
        own = Path(previous).absolute().parent == Path(self.dirpath).absolute()
        return own and super()._should_remove_checkpoint(trainer, previous, current)
