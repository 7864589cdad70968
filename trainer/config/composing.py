"""Compose a configuration of the groups' files, and say in one sentence what is wrong, before torch is imported."""

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import hydra
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ...strategies.core.errors import ConfigError, did_you_mean, nearest
from ...strategies.core.options import GONE as GONE_OPTIONS
from ...strategies.core.options import Advice, Count, Limit, Natural, NotNegative, Positive, verify_value

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # since Python 3.11

CONFIG_MODULE = "evener.conf"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Source:
    """Where a command's configuration comes from: a project's directory, absolute, and this package, or it alone."""

    config_dir: str | None = None
    config_name: str = "train"

    def compose(self, overrides: Sequence[str] = (), return_hydra: bool = False) -> DictConfig:
        """Compose the root configuration, as the command line does; `return_hydra` keeps the node `hydra`."""
        at = initialize_config_module if self.config_dir is None else initialize_config_dir
        command_lines = GlobalHydra.instance().hydra  # there can be only one at a time
        GlobalHydra.instance().clear()
        try:
            with at(self.config_dir or CONFIG_MODULE, version_base="1.3"):
                return compose(self.config_name, overrides=list(overrides), return_hydra_config=return_hydra)
        finally:
            GlobalHydra.instance().hydra = command_lines

    def named(self, overrides: Sequence[str]) -> list[str]:
        """Add the name of a run that has another module than the package's default: `name=`, that of the module."""
        values = {key: value for key, _, value in (word.partition("=") for word in overrides)}
        module = values.get("module", "")
        if module == "custom":
            module = values.get("module._target_", "").rpartition(".")[2]
        given = self.config_dir or "name" in values or "experiment" in values
        return [*overrides, *([] if given or not module.isidentifier() else [f"name={module}"])]

    def folders(self) -> "list[Traversable]":
        """The directories that hold groups, the first one found wins."""
        return [*([Path(self.config_dir)] if self.config_dir else []), resources.files(CONFIG_MODULE)]

    def groups(self) -> list[str]:
        """Names of all groups that can be chosen, sorted."""
        names = {entry.name for folder in self.folders() if folder.is_dir() for entry in folder.iterdir()}
        return sorted(name for name in names if self.files(name))

    def files(self, group: str) -> list[str]:
        """List the files of a group by the names that choose them, sorted; empty for an unknown group."""
        inside = [folder / group for folder in self.folders()]
        names = {file.name for folder in inside if folder.is_dir() for file in folder.iterdir()}
        return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))

    def text(self, name: str) -> str:
        """The text of a file, such as `strategy/ddp`; empty if there is none."""
        files = (folder / f"{name}.yaml" for folder in self.folders())
        return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")

    def values(self, name: str) -> dict[str, Any]:
        """The keys of a file, such as `strategy/ddp`, and those that it inherits, with their values as written."""
        own = yaml.load(self.text(name), _Loader) or {}
        found: dict[str, Any] = {}
        for base in own.pop("defaults", []):
            if isinstance(base, str) and base != "_self_":
                found |= self.values(f"{name.rpartition('/')[0]}/{base}")
        return found | own

    def with_option(self, group: str, option: str) -> list[str]:
        """How the files of a group that have an option are chosen: `group=name`."""
        return [f"{group}={name}" for name in self.files(group) if option in self.values(f"{group}/{name}")]


PACKAGE = Source()
"""This package's own configuration."""


def leaves(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings with their keys joined by dots; an empty mapping is a value."""
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


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


def composition_sentence(exc: Exception, source: Source, overrides: Sequence[str]) -> str | None:
    """Summarize an error of Hydra or OmegaConf in one sentence; None for any other."""
    if isinstance(exc, MissingConfigException) and exc.options is not None and exc.missing_cfg_file:
        group, _, option = exc.missing_cfg_file.rpartition("/")
        suggestion = did_you_mean(option, exc.options, f"{group}=")
        return f"{group}={option} is unknown. Choose one of: {', '.join(sorted(exc.options))}.{suggestion}"
    frames = traceback.extract_tb(exc.__traceback__)
    from_hydra = bool(frames) and frames[-1].filename.startswith(str(Path(hydra.__file__).parent))
    if not (from_hydra or isinstance(exc, (CompactHydraException, OmegaConfBaseException))):
        return None
    told = next(line.strip().rstrip(".") for line in str(exc).splitlines() if line.strip())
    if told.startswith("Config group override must be"):
        return "A config group can't be null. Choose one of its options, such as logger=none or data=none."
    if isinstance(exc, OverrideParseException):
        return (
            f"{exc.override} can't be parsed ({told}). Quote values that contain = , {{ }} or [ ], and protect the "
            "quotes from the shell, such as \"name='a=b'\"."
        )
    if told.startswith("Ambiguous value"):
        return f"{told}. For a list use brackets, as in key=[a,b]; for a sweep add -m."
    if unknown := re.match(r"Could not override '([^']+)'", told):
        with suppress(Exception):  # a file of `--config-dir`, which is not among those of the source
            return _unknown_key(unknown[1], source, overrides)
    return f"{told}. Run with --cfg job to print the configuration, or --help to list the groups."


def _unknown_key(key: str, source: Source, overrides: Iterable[str]) -> str:
    """Say what a key that does not exist may have meant; overrides that choose files decide which keys exist."""
    if key in GONE:
        return f"{key} is no longer there. {GONE[key]}"
    groups = source.groups()
    chosen = [word for word in overrides if word.partition("=")[0] in groups and "," not in word.partition("=")[2]]
    cfg: Any = source.compose(chosen, return_hydra=True)
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    known = [*(key for key, _ in leaves(plain) if not key.startswith("hydra")), *groups]
    (owner, _, last), (group, _, option) = key.rpartition("."), key.partition(".")
    chosen_one = f"{group}={cfg.hydra.runtime.choices.get(group)}"
    if option and chosen_one.endswith("=custom"):
        value = next((word.partition("=")[2] for word in overrides if word.startswith(f"{key}=")), "...")
        return f"{key} is an option of your own class, so it is not in {chosen_one}. Add it with +{key}={value}."
    others = source.with_option(group, option.partition(".")[0]) if option else []
    if others and chosen_one not in others:  # otherwise the unknown part comes later in the key
        return f"{key} is not an option of {chosen_one}, but of {' and '.join(others)}."
    siblings = [name for of, _, name in (k.rpartition(".") for k in known) if owner and of == owner]
    if siblings:  # a long key is like any other of the same owner
        found = (near := nearest(last, siblings)) and f"{owner}.{near}"
    else:
        found = next((k for k in known if k.rpartition(".")[2] == key), None) or nearest(key, known)
    if found:
        return f"{key} is unknown. Did you mean {found}?"
    new = f"+{key}" if option else f"+module.{key}"
    return (
        f"{key} is unknown: neither a key nor a group. Run --help to list them; {new}=... adds an option to your class."
    )


def incomplete(cfg: DictConfig, exc: OmegaConfBaseException) -> str:
    """Say which value is missing and how to set it, listing the group's files that have it."""
    reason = str(exc).splitlines()[0]
    if isinstance(exc, MissingMandatoryValue):
        return f"The configuration is incomplete: {exc.full_key} has no value. Give {exc.full_key}=..."
    missing = re.search(r"Interpolation key '(\w+)\.(\w+)' not found", reason)
    if missing is None or not isinstance(cfg.get(missing[1]), DictConfig):
        return f"The configuration is incomplete: {reason}. Set that key."
    group, option = missing.groups()
    given = str(cfg[group].get("_target_", group)).rpartition(".")[2]
    choices = " or ".join(PACKAGE.with_option(group, option)) or f"a {group} that has it"
    return (
        f"{exc.full_key} reads {group}.{option}, which {given} does not have. Choose {choices}, or set {exc.full_key}."
    )


def verify_all_read(cfg: DictConfig, others: str) -> None:
    """Refuse root keys not in `conf/train.yaml` that are no groups and that no value, nor `others`, refers to."""
    known = [*map(str, OmegaConf.create(PACKAGE.text("train"))), *PACKAGE.groups()]
    text = OmegaConf.to_yaml(cfg) + others
    for key in map(str, cfg):
        if key not in known and not re.search(rf"\$\{{\.*{re.escape(key)}\b", text):
            value = OmegaConf.to_container(cfg, resolve=False)[key]  # type: ignore[call-overload,index]
            raise ConfigError(
                f"{key} is read by nothing, so that it would change nothing. An option of your own class belongs to "
                f"its group: +module.{key}={value} or +data.{key}={value}.{did_you_mean(key, known)}"
            )


def verify_own_data(choices: Mapping[Any, Any], words: Iterable[str]) -> None:
    """Refuse an example's data, which no override chooses, for a module that is not an example's."""
    module, data = choices.get("module"), choices.get("data")
    own = module == "custom" or module not in PACKAGE.files("module")
    chosen = data in ("custom", "none") or data not in PACKAGE.files("data")
    if own and not chosen and not any(word.startswith(("data=", "data@", "experiment=")) for word in words):
        raise ConfigError(
            f"data={data} is the example's, and module={module} is yours. Give data=custom data._target_=<class>, "
            f"data=none if the module has its own loaders, or data={data} to train on these."
        )


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
    if OmegaConf.select(cfg, "data.batch_size", throw_on_resolution_failure=False) == "auto":
        raise ConfigError(
            "data.batch_size=auto is no longer there. Give a number; mode=plan device_memory_gb=<GB> finds the largest."
        )
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
