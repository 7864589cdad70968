"""The exception raised for user errors, and names that others may have meant."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class ConfigError(ValueError):
    """Raised, before the first step, for a request that can't be honoured.

    The message says what was given, what is allowed and what to do. `train.py` prints it without a traceback.
    """


class PartsDiffer(ConfigError):
    """Raised where parts of a batch can't be made, or train otherwise than the whole batch."""

    plans: Any = None  # what losses divide by, as far as that was found
    in_chunks: bool = False  # parts of ranks are right, and only parts of these are not
    outside: Collection[str] = ()  # submodules of which a step is known to use parameters outside of their forward
    unused: bool = False  # some trained parameters are known to take no part in a loss


def verify_submodules(option: str, names: Iterable[str], module: "nn.Module") -> None:
    """Refuse names that are not those of submodules; `option`, which was given them, begins the message."""
    known = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
            raise ConfigError(
                f"{option}: {type(module).__name__} has no module {name!r}; the nearest are {', '.join(near)}. Give "
                "names of module.named_modules()."
            )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like a given one; None if none is like it."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """` Did you mean <before><name>?`, to be put behind a sentence; empty if no known name is like the given one."""
    return f" Did you mean {before}{found}?" if (found := nearest(name, known)) else ""
