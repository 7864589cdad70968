"""Log to TensorBoard: one event stream per run, in the run directory; the hyperparameters of the HPARAMS tab."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytorch_lightning as pl
import pytorch_lightning.loggers as pl_loggers
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams
from typing_extensions import override

from ...strategies import STRATEGIES, ConfigError
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
        self.differing: list[str] = []
        """Hyperparameters that distinguish this run from others; the HPARAMS tab lists them and the strategy first."""
        self._tags: set[str] = set()
        self._layout: Layout | None = None
        self._written_layout: Layout = {}

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

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values, and add the charts of tags that are new to the CUSTOM SCALARS tab."""
        self._add_charts(metrics)
        super().log_metrics(dict(metrics), step)

    @override
    @rank_zero_only
    def log_graph(self, model: pl.LightningModule, input_array: Any = None) -> None:
        """Show the module's graph in the GRAPHS tab, if `log_graph` is set.

        Raises:
            ConfigError: the module has no example input.
        """
        if self._log_graph and input_array is None and model.example_input_array is None:
            raise ConfigError(
                f"logger.tensorboard.log_graph=true needs an example input, and {type(model).__name__} sets none. Set "
                "self.example_input_array to a tensor in the module, or log_graph=false."
            )
        super().log_graph(model, input_array)

    @rank_zero_only
    def log_text(self, name: str, text: str) -> None:
        """Show preformatted text under a title in the TEXT tab."""
        self.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))

    @rank_zero_only
    def log_layout(self, monitor: str | None) -> None:
        """Arrange the charts of the CUSTOM SCALARS tab, each as soon as one of its tags is logged."""
        self._layout = layout(monitor)
        self._add_charts(())

    def _add_charts(self, tags: Collection[str]) -> None:
        """Write the layout again if tags are new and have a chart; TensorBoard shows the last one."""
        self._tags.update(tags)
        charts = with_data(self._layout or {}, self._tags)
        if charts != self._written_layout:
            self._written_layout = charts
            self._writer.add_summary(custom_scalars(charts), len(self._tags))

    @rank_zero_only
    def log_final_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write the HPARAMS tab: the hyperparameters and the final metrics."""
        given = cast("dict[str, Any]", self.hparams)
        # without those of `save_hyperparameters` that the configuration has, too
        names = [name for name in given if not any(f"{group}/{name}" in given for group in GROUPS)]
        experiment, start, end = hparams({_shown(name): _plain(given[name]) for name in names}, dict(metrics))
        mark_differing(experiment, {"strategy", *map(_shown, self.differing)})
        for summary in (experiment, start, end):
            self._writer.add_summary(summary)

    @property
    def _writer(self) -> Any:
        experiment = self.experiment
        assert isinstance(experiment, SummaryWriter)
        return experiment._get_file_writer()

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


def mark_differing(experiment: Any, differing: Collection[str]) -> None:
    """Mark hyperparameters as differing between runs, so that TensorBoard lists them first."""
    plugin_data: Any = getattr(plugin_data_pb2, "HParamsPluginData")  # noqa: B009  # made at run time
    for value in experiment.value:
        data = plugin_data.FromString(value.metadata.plugin_data.content)
        for info in data.experiment.hparam_infos:
            info.differs = info.name in differing
        value.metadata.plugin_data.content = data.SerializeToString()


def event_files(folder: str | Path) -> list[Path]:
    """The event files that runs have begun in a folder, in the order in which TensorBoard reads them."""
    return sorted(Path(folder).glob(f"events.out.tfevents.*{SUFFIX}"))


Layout: TypeAlias = dict[str, dict[str, list[Any]]]
"""Category → chart → [`Multiline`, regular expressions of tags], the argument of `SummaryWriter.add_custom_scalars`."""

OUR_OWN = ("speed/", "device/", "balance/", "gradient/", "lr-")
"""Prefixes of tags that are not metrics of the module."""


def layout(monitor: str | None) -> Layout:
    """Arrange all charts that there can be; `with_data` selects those to show.

    The module's tags, which are not known in advance, are classified by name: those that contain `loss` are losses; the
    monitored metric, which decides which checkpoint is best, gets a chart of its own.
    """
    not_ours = f"(?i)(?!{'|'.join(OUR_OWN)}|epoch$)"
    exactly = {f"monitored: {monitor}": monitor.replace(".", "[.]") + "$"} if monitor else {}
    expressions = {
        "Loss and metrics": {"loss": not_ours + ".*loss", "metrics": not_ours + "(?!.*loss)", **exactly},
        "Speed": {
            "samples per second": "speed/samples_per_s$",
            "step time in ms": "speed/(step|data_wait)_ms$",
        },
        "Devices": {
            "share of the batch": r"balance/share_\d+$",
            "time in s": r"balance/time_s_\d+$",
            "peak memory in MiB": r"device/peak_memory_mib_\d+$",
            "balance efficiency": "balance/efficiency$",
        },
        "Optimizer": {"learning rate": "lr-", "gradient norm": "gradient/norm"},
    }
    return {
        name: {title: ["Multiline", [own]] for title, own in charts.items()} for name, charts in expressions.items()
    }


def with_data(charts: Layout, tags: Collection[str]) -> Layout:
    """Select the charts that have at least one line, and the categories that have charts left."""
    chosen = {
        category: {
            title: chart for title, chart in of_category.items() if any(re.match(e, t) for e in chart[1] for t in tags)
        }
        for category, of_category in charts.items()
    }
    return {category: of_category for category, of_category in chosen.items() if of_category}


GROUPS = ("strategy", "module", "data")

_WORDS = {cls.__name__: word for word, cls in STRATEGIES.items()}


def hyperparameters(cfg: DictConfig) -> dict[str, Any]:
    """Flatten the options that distinguish runs.

    They are those of module, data and strategy, the root keys that change training, and all command-line overrides.
    """
    values: dict[str, Any] = {key: str(cfg[key]) for key in ("devices", "precision", "seed")}
    for group in GROUPS:
        options = cast("dict[str, Any]", OmegaConf.to_container(cfg[group])) if cfg.get(group) else {}
        name = str(options.pop("_target_", None)).rpartition(".")[2]
        values[f"{group}/_target_"] = _WORDS.get(name, name)  # not `module`: MLflow's files can't have `module/lr` then
        values |= {f"{group}/{key}": _plain(value) for key, value in options.items()}
    for name in overridden(cfg):
        given = OmegaConf.select(cfg, name.replace("/", "."))
        if name not in values and given is not None and not OmegaConf.is_config(given):
            values[name] = _plain(given)
    return values


def overridden(cfg: DictConfig) -> list[str]:
    """List the command-line overrides, named like hyperparameters: `module.lr=0.1` is `module/lr`.

    For a job of a multirun, only the overrides that differ between jobs.
    """
    run_dir = Path(cfg.run_dir)
    parser = OverridesParser.create()
    of_all = parser.parse_overrides(_listed(run_dir.parent / "multirun.yaml", "hydra.overrides.task"))
    fixed = {override.key_or_group for override in of_all if not override.is_sweep_override()}
    own = [override.key_or_group for override in parser.parse_overrides(_listed(run_dir / ".hydra" / "overrides.yaml"))]
    return [f"{key}/_target_" if key in GROUPS else key.replace(".", "/") for key in own if key not in fixed]


def _listed(file: Path, key: str | None = None) -> list[str]:
    """The overrides in a file that Hydra wrote; empty if the file does not exist."""
    content: Any = OmegaConf.load(file) if file.exists() else []
    return [str(override) for override in (OmegaConf.select(content, key) if key and content else content) or []]


def _shown(name: str) -> str:
    """The name of a hyperparameter in the HPARAMS tab."""
    return name.removesuffix("/_target_")


def in_order(metrics: Mapping[str, float], first: str | None) -> dict[str, float]:
    """Sort the module's metrics: the monitored one first, then those of test, of validation, and others."""

    def rank(name: str) -> tuple[bool, ...]:
        return name != first, not name.startswith("test"), not name.startswith("val")

    return {name: metrics[name] for name in sorted(metrics, key=rank) if not name.startswith(OUR_OWN)}


def _plain(value: Any) -> int | float | str:
    if isinstance(value, bool):
        return str(value).lower()  # torch writes True as the number 1
    return value if isinstance(value, (int, float, str)) else str(value)
