"""Give one object another method for a while."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Generator[None]:
    """Have an object's own attribute hide what it had by that name, and bring that back afterwards."""
    kept = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(kept)
