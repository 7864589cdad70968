"""Explain missing values and unresolved interpolations between config groups."""

import re

from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from .descriptions import choices_with
from .group_files import PACKAGE

_MISSING = re.compile(r"Interpolation key '(\w+)\.(\w+)' not found")


def incomplete(cfg: DictConfig, exc: OmegaConfBaseException) -> str:
    """Say which value is missing and how to set it.

    Args:
        cfg: the composed configuration, which does not resolve.
        exc: OmegaConf's error.

    Returns:
        One sentence. If one group reads an option that another group lacks, it lists the group's files that have it.
    """
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
