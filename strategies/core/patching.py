"""Temporarily replace an attribute of one object."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Generator[None]:
    """Set an attribute on an object inside the block, and restore the previous one afterwards."""
    kept = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(kept)
