"""Suggest a name that exists for one that does not, or no longer does."""

import difflib
from collections.abc import Iterable

from ...strategies.core.errors import ConfigError
from ...strategies.core.options import GONE as GONE_OPTIONS

GONE = {
    "logger.tensorboard.sub_runs": "All values are in one event file; TensorBoard's filter of tags tells them apart.",
    "plan.measure": "Give mode=compare, which trains a few steps on the devices, and tells their peaks.",
    "evener.trainer.profiler.ShortProfiler": "Give trainer.profiler=simple.",
    "evener.trainer.callbacks.ModuleSummary": "Give pytorch_lightning.callbacks.ModelSummary.",
} | {f"strategy.{name}": advice for name, advice in GONE_OPTIONS.items()}
"""Options and classes of earlier versions, and what to do without them."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like a given one; None if none is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return found[0] if found else None


def verify_not_gone(name: str) -> None:
    """Refuse an option or a class of an earlier version by what took its place."""
    if name in GONE:
        raise ConfigError(f"{name} is no longer there. {GONE[name]}")


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """` Did you mean <before><name>?`, to be put behind a sentence; empty if no known name is like the given one."""
    return f" Did you mean {before}{found}?" if (found := nearest(name, known)) else ""
