"""Groups that belong together: a module may take an option from its data, which other data does not have."""

import re
from importlib import resources

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ... import conf

_MISSING = re.compile(r"Interpolation key '(\w+)\.(\w+)' not found")


def incomplete(cfg: DictConfig, exc: OmegaConfBaseException) -> str:
    """Say which value is missing, and what to choose instead.

    Args:
        cfg: the composed configuration, which does not resolve.
        exc: the reason.

    Returns:
        One sentence; where an option of one group is missing in another, with the choices of that group that have it.
    """
    reason = str(exc).splitlines()[0]
    if isinstance(exc, MissingMandatoryValue):
        return f"The configuration is not complete: {exc.full_key} has no value. Give {exc.full_key}=..."
    missing = _MISSING.search(reason)
    if missing is None or not isinstance(cfg.get(missing[1]), DictConfig):
        return f"The configuration is not complete: {reason}. Set that key."
    group, option = missing.groups()
    given = str(cfg[group].get("_target_", group)).rpartition(".")[2]
    choices = " or ".join(f"{group}={name}" for name in choices_with(group, option)) or f"a {group} that has it"
    return (
        f"{exc.full_key} takes {group}.{option}, which {given} does not have: they are not made for each other. "
        f"Choose {choices}, or set {exc.full_key}."
    )


def choices_with(group: str, option: str) -> list[str]:
    """Names of the files in a group of this package's configuration that have an option, sorted."""
    folder = resources.files(conf) / group
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")] if folder.is_dir() else []
    having = [file.name for file in files if option in OmegaConf.create(file.read_text(encoding="utf-8"))]
    return sorted(name.removesuffix(".yaml") for name in having)
