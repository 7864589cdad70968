"""Check the values of a configuration for which no class has to be imported, before torch is."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...strategies.core.errors import ConfigError, did_you_mean
from ...strategies.core.options import GONE as GONE_OPTIONS
from ...strategies.core.options import Advice, Count, Limit, Natural, NotNegative, Positive, verify_value

MODES = ("fit", "validate", "test", "predict", "compare", "plan")

PRECISIONS: TypeAlias = Literal[
    "transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true",
    "64-true", "64", "32", "16", "bf16",
]  # fmt: skip
"""Lightning's words for `precision`."""

ROOT: dict[str, Any] = {
    "name": str,
    "log_dir": str,
    "run_dir": str,
    "tags": list[str],
    "notes": str | None,
    "devices": Annotated[int | str | list[int | str], Advice("Such as devices=2, devices=[cuda:0,cpu] or auto.")],
    "num_nodes": Count,
    "precision": Literal[64, 32, 16, PRECISIONS, None],
    "seed": cast("Any", Annotated[int, Limit(">=", 0), Limit("<", 2**32)]) | None,  # numpy's limit
    "resume": str | None,
    "config": Literal["run", None],
    "compile": bool,
    "test_after_fit": bool,
    "monitor": str | None,
    "monitor_mode": Literal["min", "max"],
    "device_memory_gb": cast("Any", Positive) | None,
    "compare.strategies": list[str] | None,
    "compare.steps": int,
    "compare.warmup_steps": int,
    "compare.timeout_s": Positive,
    "compare.options": dict[str, Any],
    "extras.ignore_warnings": bool,
    "extras.enforce_tags": bool,
    "extras.print_config": bool,
    "launcher.max_restarts": Natural,
    "launcher.monitor_interval_s": Positive,
    "launcher.shutdown_timeout_s": NotNegative,
}
"""Options of the whole run, of `mode=compare` and of the launcher."""

GONE = {
    "logger.tensorboard.sub_runs": "All values are in one event file; TensorBoard's filter of tags tells them apart.",
    "launcher.spares": "Leave it out: the ranks that live go on without those that have died.",
    "launcher.min_processes": "Leave it out, and start the run again with resume=last and fewer devices.",
    "plan.measure": "Give mode=compare, which trains a few steps on the devices, and tells their peaks.",
    "evener.trainer.profiler.ShortProfiler": "Give trainer.profiler=simple.",
    "evener.trainer.profiler.TraceProfiler": "Give trainer.profiler=pytorch, or debug=trace.",
    "evener.trainer.callbacks.ModuleSummary": "Give pytorch_lightning.callbacks.ModelSummary.",
} | {f"{group}.{name}": advice for group in ("strategy", "checkpoint") for name, advice in GONE_OPTIONS.items()}
"""Options and classes of earlier versions, and what to do without them."""


def verify_not_gone(name: str) -> None:
    """Refuse an option or a class of an earlier version by what took its place."""
    if name in GONE:
        raise ConfigError(f"{name} is no longer there. {GONE[name]}")


def verify_plain(cfg: DictConfig) -> None:
    """Refuse the first mistake in the root options; values that do not resolve are left to those who need them."""
    if (mode := str(cfg.mode)) not in MODES:
        suggestion = did_you_mean(mode, MODES, "mode=")
        raise ConfigError(f"mode={mode} is unknown. Choose one of {', '.join(MODES)}.{suggestion}")
    values: dict[str, Any] = {}
    for key, hint in ROOT.items():
        try:
            value = OmegaConf.select(cfg, key, default=...)
            values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException:
            continue
        if value is not ...:
            verify_value(key, whole(values[key]), hint)
    if values.get("extras.enforce_tags") is True and not cfg.tags:
        raise ConfigError("tags=[] is refused by extras.enforce_tags=true. Give some, such as tags=[baseline].")
    for key in ("log_dir", "run_dir"):
        if values.get(key) == "":
            raise ConfigError(f"{key} is empty. Give the path of a directory.")
    path = Path(name := str(values.get("name", "run")))
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"name={name!r} must be a relative path within log_dir. Give a name, or a path such as name=digits/mine."
        )


def whole(value: Any) -> Any:
    """A number without a fraction, as the command line reads 2e3, as the whole number that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
