"""Decide whether a trainer takes lean steps, which repeat some of Lightning's and torch's own code."""

import os
from functools import cache

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from ...strategies import ConfigError

TESTED = {"torch": ("2.13", "2.14", "2.15"), "Lightning": ("2.6",)}
"""Minor versions that the lean steps were tested with."""


def is_lean(asked: bool | None) -> bool:
    """Whether to take lean steps: as asked, or by the installed versions if None.

    Raises:
        ConfigError: the environment has the variable that once decided.
    """
    if "EVENER_LEAN" in os.environ:
        raise ConfigError(
            "EVENER_LEAN is no longer read. Unset it, and give Trainer(lean=False) or trainer.lean=false."
        )
    return _is_tested(torch.__version__, pl.__version__) if asked is None else asked


@cache
def _is_tested(torchs: str, lightnings: str) -> bool:
    """Whether both versions were tested; the warning appears once."""
    installed = {"torch": torchs, "Lightning": lightnings}
    untested = [
        f"{name} {version} (tested: {', '.join(TESTED[name])})"
        for name, version in installed.items()
        if ".".join(version.split(".")[:2]) not in TESTED[name]
    ]
    if untested:
        rank_zero_warn(
            f"Evener's lean steps were not tested with {' and '.join(untested)}. Lightning's own loops run instead, "
            "which are slower; Trainer(lean=True) takes the lean steps."
        )
    return not untested
