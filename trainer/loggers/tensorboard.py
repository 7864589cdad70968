"""Log to TensorBoard: one event stream per run, in the run directory; the hyperparameters of the HPARAMS tab."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytorch_lightning.loggers as pl_loggers
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from ...strategies import STRATEGIES
from ...strategies.core.options import Count

SUFFIX = ".evener"
"""How the names of event files end that are cut back to where a checkpoint was written that a run resumes."""


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


_OUR_OWN = ("speed/", "device/", "balance/", "gradient/", "lr-")
"""Prefixes of tags that are not metrics of the module."""
_GROUPS = ("strategy", "module", "data")

_WORDS = {cls.__name__: word for word, cls in STRATEGIES.items()}


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
