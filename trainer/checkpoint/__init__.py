"""Write, find and verify checkpoint files, and restore a run exactly.

Exports: Checkpoint, Resumable, RunTimer, distinguish, make_resumable, next_of; file_io, checkpoint_io,
clean_points.
May import: logging, loggers.
"""

from ._callback import Checkpoint, RunTimer, distinguish
from ._loader_state import Resumable, make_resumable, next_of

__all__ = ["Checkpoint", "Resumable", "RunTimer", "distinguish", "make_resumable", "next_of"]
