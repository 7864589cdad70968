"""Describe in one sentence a configuration that Hydra can't compose, or that does not resolve."""

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ..config.descriptions import choices_with
from ..config.group_files import PACKAGE, Source
from ..config.nearest import GONE, did_you_mean, nearest

_MISSING = re.compile(r"Interpolation key '(\w+)\.(\w+)' not found")


def composition_sentence(exc: Exception, source: Source, overrides: Sequence[str]) -> str | None:
    """Summarize an error of Hydra or OmegaConf; None for any other."""
    if isinstance(exc, MissingConfigException) and exc.options is not None and exc.missing_cfg_file:
        group, _, option = exc.missing_cfg_file.rpartition("/")
        suggestion = did_you_mean(option, exc.options, f"{group}=")
        return f"{group}={option} is unknown. Choose one of: {', '.join(sorted(exc.options))}.{suggestion}"
    frames = traceback.extract_tb(exc.__traceback__)
    from_hydra = bool(frames) and frames[-1].filename.startswith(str(Path(hydra.__file__).parent))
    if not (from_hydra or isinstance(exc, (CompactHydraException, OmegaConfBaseException))):
        return None
    if str(exc).startswith("Config group override must be"):
        return "A config group can't be null. Choose one of its options, such as logger=none or data=none."
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if isinstance(exc, OverrideParseException):
        return (
            f"{exc.override} can't be parsed ({lines[0]}). Quote values that contain = , {{ }} or [ ], and protect the "
            "quotes from the shell, such as \"name='a=b'\"."
        )
    if lines[0].startswith("Ambiguous value"):
        return f"{lines[0].rstrip('.')}. For a list use brackets, as in key=[a,b]; for a sweep add -m."
    unknown = re.match(r"Could not override '([^']+)'", lines[0])
    if unknown:
        return _unknown_key(unknown[1], source, overrides)
    return f"{lines[0].rstrip('.')}. Run with --cfg job to print the configuration, or --help to list the groups."


def _unknown_key(key: str, source: Source, overrides: Iterable[str]) -> str:
    """Say what a key that does not exist may have meant; overrides that choose files decide which keys exist."""
    if key in GONE:
        return f"{key} is no longer there. {GONE[key]}"
    groups = source.groups()
    chosen = [word for word in overrides if _chooses(word, groups)]
    cfg: Any = source.compose(chosen, return_hydra=True)
    known = [*(key for key in _keys(cfg) if not key.startswith("hydra")), *groups]
    group, _, option = key.partition(".")
    chosen_one = cfg.hydra.runtime.choices.get(group)
    value = next((word.partition("=")[2] for word in overrides if word.startswith(f"{key}=")), "...")
    if option and chosen_one == "custom":
        return f"{key} is an option of your own class, so it is not in {group}=custom. Add it with +{key}={value}."
    others = choices_with(source, group, option.partition(".")[0]) if option else []
    if others and chosen_one not in others:  # otherwise the unknown part comes later in the key
        named = " and ".join(f"{group}={name}" for name in others)
        return f"{key} is not an option of {group}={chosen_one}, but of {named}."
    owner, _, last = key.rpartition(".")
    if owner in known:  # of which the names are compared: a long one is like any key of the same owner
        near = nearest(last, [name for of, _, name in (k.rpartition(".") for k in known) if of == owner])
        found = near and f"{owner}.{near}"
    else:
        found = next((k for k in known if k.rpartition(".")[2] == key), None) or nearest(key, known)
    if found:
        return f"{key} is unknown. Did you mean {found}?"
    new = f"+{key}" if option else f"+module.{key}"
    return (
        f"{key} is unknown: neither a key nor a group. Run --help to list them; {new}={value} adds an option to your "
        "class."
    )


def _keys(options: Any, before: str = "") -> Iterator[str]:
    """List the keys of a configuration, those of its parts joined by dots."""
    plain: Any = OmegaConf.to_container(options, resolve=False) if OmegaConf.is_config(options) else options
    for key, value in plain.items():
        yield f"{before}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{before}{key}.")


def _chooses(word: str, groups: Iterable[str]) -> bool:
    """Whether an override chooses one file of a group."""
    name, _, value = word.partition("=")
    return name in groups and "," not in value


def incomplete(cfg: DictConfig, exc: OmegaConfBaseException) -> str:
    """Say which value is missing and how to set it, listing the group's files that have it."""
    reason = str(exc).splitlines()[0]
    if isinstance(exc, MissingMandatoryValue):
        return f"The configuration is incomplete: {exc.full_key} has no value. Give {exc.full_key}=..."
    missing = _MISSING.search(reason)
    if missing is None or not isinstance(cfg.get(missing[1]), DictConfig):
        return f"The configuration is incomplete: {reason}. Set that key."
    group, option = missing.groups()
    given = str(cfg[group].get("_target_", group)).rpartition(".")[2]
    choices = (
        " or ".join(f"{group}={name}" for name in choices_with(PACKAGE, group, option)) or f"a {group} that has it"
    )
    return (
        f"{exc.full_key} reads {group}.{option}, which {given} does not have. Choose {choices}, or set {exc.full_key}."
    )
