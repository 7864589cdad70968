"""Select the hyperparameters and metrics of the HPARAMS tab."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ...strategies import STRATEGIES

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


def without_repetition(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop hyperparameters from `save_hyperparameters` that the configuration already contains."""
    return {key: v for key, v in values.items() if not any(f"{group}/{key}" in values for group in GROUPS)}


def shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Name and write hyperparameters as TensorBoard's HPARAMS tab shows them.

    `strategy/_target_` is `strategy`, and values other than numbers are text.
    """
    return {key.removesuffix("/_target_"): _plain(value) for key, value in values.items()}


def in_order(metrics: Mapping[str, float], first: str | None, own: Iterable[str]) -> dict[str, float]:
    """Sort metrics, but for those with `own` prefixes: the monitored one first, then those of test and validation."""
    ranks = ("test", "val", "")

    def rank(name: str) -> tuple[bool, int]:
        return name != first, next(i for i, prefix in enumerate(ranks) if name.startswith(prefix))

    kept = [name for name in metrics if not name.startswith(tuple(own))]
    return {name: metrics[name] for name in sorted(kept, key=rank)}


def _plain(value: Any) -> int | float | str:
    if isinstance(value, bool):
        return str(value).lower()  # torch writes True as the number 1
    return value if isinstance(value, (int, float, str)) else str(value)
