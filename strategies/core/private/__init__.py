"""Reach the private names of other libraries, one file per library.

Exports: of_torch, of_lightning, of_metrics (torchmetrics); put.
May import: nothing of this project.

An attribute `_name` is read by `of_lightning.name(owner)` and set by `put(owner, name=value)`; a class `_Name` is
`of_lightning.Name`. tests/test_private_names.py pins what each does, and refuses private names elsewhere.
"""

from typing import Any


def put(owner: object, **values: Any) -> None:
    """Set private attributes: `put(metric, update_count=1)` sets `_update_count`."""
    for name, value in values.items():
        setattr(owner, f"_{name}", value)
