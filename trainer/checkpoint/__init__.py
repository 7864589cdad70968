"""Write, find and verify checkpoint files, and restore a run exactly.

Exports: Checkpoint, distinguish; find, file_io, snapshots, clean_points.
May import: logging.
"""

from ._callback import Checkpoint, distinguish

__all__ = ["Checkpoint", "distinguish"]
