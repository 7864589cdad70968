"""Describe a configuration that Hydra can't compose in one sentence."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from ..config.group_files import PACKAGE, Source
from ..config.nearest import did_you_mean, unknown_key


def composition_sentence(exc: Exception, source: Source = PACKAGE, overrides: Sequence[str] = ()) -> str | None:
    """Summarize an error of Hydra or OmegaConf; None for any other.

    Args:
        source: where the configuration comes from.
        overrides: as given on the command line.
    """
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
        return unknown_key(unknown[1], source, overrides)
    return f"{lines[0].rstrip('.')}. Run with --cfg job to print the configuration, or --help to list the groups."
