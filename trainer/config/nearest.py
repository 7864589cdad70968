"""Suggest the nearest of the names that exist for one that does not."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf

from .descriptions import choices_with
from .group_files import Source


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like a given one; None if none is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """` Did you mean …?`, to be put behind a sentence; empty if no known name is like the given one.

    Args:
        name: what was given.
        known: what exists.
        before: what stands before the name, such as `mode=`.
    """
    found = nearest(name, known)
    return f" Did you mean {before}{found}?" if found else ""


def unknown_key(key: str, source: Source, overrides: Iterable[str]) -> str:
    """Say what a key that does not exist may have meant.

    Args:
        key: as given, such as `trainer.max_epoch`.
        source: where the configuration comes from.
        overrides: all that were given; those that choose files of groups decide which keys exist.
    """
    groups = source.groups()
    chosen = [word for word in overrides if _chooses(word, groups)]
    cfg: Any = source.compose(chosen, return_hydra=True)
    known = [*(key for key in keys(cfg) if not key.startswith("hydra")), *groups]
    group, _, option = key.partition(".")
    chosen_one = cfg.hydra.runtime.choices.get(group)
    others = choices_with(source, group, option.partition(".")[0]) if option else []
    if others and chosen_one not in others:  # otherwise the unknown part comes later in the key
        named = " and ".join(f"{group}={name}" for name in others)
        return f"{key} is not an option of {group}={chosen_one}, but of {named}."
    found = next((k for k in known if k.rpartition(".")[2] == key), None) or nearest(key, known)
    if found:
        return f"{key} is unknown. Did you mean {found}?"
    return f"{key} is unknown: neither a key nor a group. Run --help to list them, or add a new key with +{key}=..."


def keys(options: Any, before: str = "") -> Iterator[str]:
    """List the keys of a configuration, those of its parts joined by dots."""
    plain: Any = OmegaConf.to_container(options, resolve=False) if OmegaConf.is_config(options) else options
    for key, value in plain.items():
        yield f"{before}{key}"
        if isinstance(value, dict):
            yield from keys(value, f"{before}{key}.")


def _chooses(word: str, groups: Iterable[str]) -> bool:
    """Whether an override chooses one file of a group."""
    name, _, value = word.partition("=")
    return name in groups and "," not in value
