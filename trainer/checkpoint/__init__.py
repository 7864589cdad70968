"""Write, find and verify checkpoint files, and restore a run exactly.

Exports: Checkpoint, RunTimer, distinguish; find, file_io, checkpoint_io, snapshots, clean_points,
separate_evaluation.
May import: logging, loggers.
"""

from ._callback import Checkpoint, distinguish
from ._interval import RunTimer

__all__ = ["Checkpoint", "RunTimer", "distinguish"]
