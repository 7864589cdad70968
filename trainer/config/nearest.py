"""Suggest the nearest of the names that exist for one that does not."""

import difflib
from collections.abc import Iterable


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
