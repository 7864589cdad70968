"""Write, find and verify checkpoint files, and restore a run exactly.

Exports: Checkpoint; find, file_io, clean_points.
May import: logging.
"""

from ._callback import Checkpoint

__all__ = ["Checkpoint"]
