"""Describe in one sentence a configuration that Hydra can't compose, or that does not resolve."""

import re
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ...strategies.core.errors import did_you_mean, nearest
from ..config.group_files import PACKAGE, Source, leaves
from ..config.plain_values import GONE

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
    with suppress(Exception):  # a file of `--config-dir`, which is not among those of the source
        if unknown:
            return _unknown_key(unknown[1], source, overrides)
    return f"{lines[0].rstrip('.')}. Run with --cfg job to print the configuration, or --help to list the groups."


def _unknown_key(key: str, source: Source, overrides: Iterable[str]) -> str:
    """Say what a key that does not exist may have meant; overrides that choose files decide which keys exist."""
    groups = source.groups()
    chosen = [word for word in overrides if word.partition("=")[0] in groups and "," not in word.partition("=")[2]]
    cfg: Any = source.compose(chosen, return_hydra=True)
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    known = [*(key for key, _ in leaves(plain) if not key.startswith("hydra")), *groups]
    group, _, option = key.partition(".")
    chosen_one = cfg.hydra.runtime.choices.get(group)
    value = next((word.partition("=")[2] for word in overrides if word.startswith(f"{key}=")), "...")
    if option and chosen_one == "custom":
        return f"{key} is an option of your own class, so it is not in {group}=custom. Add it with +{key}={value}."
    others = source.with_option(group, option.partition(".")[0]) if option else []
    if others and chosen_one not in others:  # otherwise the unknown part comes later in the key
        named = " and ".join(f"{group}={name}" for name in others)
        return f"{key} is not an option of {group}={chosen_one}, but of {named}."
    if key in GONE:
        return f"{key} is no longer there. {GONE[key]}"
    owner, _, last = key.rpartition(".")
    siblings = [name for of, _, name in (k.rpartition(".") for k in known) if owner and of == owner]
    if siblings:  # a long key is like any other of the same owner
        found = (near := nearest(last, siblings)) and f"{owner}.{near}"
    else:
        found = next((k for k in known if k.rpartition(".")[2] == key), None) or nearest(key, known)
    if found:
        return f"{key} is unknown. Did you mean {found}?"
    new = f"+{key}" if option else f"+module.{key}"
    return (
        f"{key} is unknown: neither a key nor a group. Run --help to list them; {new}={value} adds an option to your "
        "class."
    )


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
    choices = " or ".join(f"{group}={name}" for name in PACKAGE.with_option(group, option)) or f"a {group} that has it"
    return (
        f"{exc.full_key} reads {group}.{option}, which {given} does not have. Choose {choices}, or set {exc.full_key}."
    )
