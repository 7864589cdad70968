"""Tell a user's code from libraries, by the file it is in."""

import os
import sysconfig
from pathlib import Path, PurePath

_ROOMS = tuple(str(Path(__file__).parents[2] / room) + os.sep for room in ("trainer", "strategies"))
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), *_ROOMS, "<")
_INSTALLED = {"site-packages", "dist-packages"}


def is_library(filename: str) -> bool:
    """Whether a file belongs to Python, an installed package, or this project.

    An environment may see the packages of another one, so that not all are where this interpreter installs its own.

    Args:
        filename: as in a code object or traceback.
    """
    return filename.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(PurePath(filename).parts)
