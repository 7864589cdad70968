"""Replace files whole, make directories that do not outlive a killed process for long, and tell libraries' files."""

import os
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePath

_INSTALLED = {"site-packages", "dist-packages"}


@contextmanager
def replacing(path: Path, durable: bool = False) -> Generator[Path]:
    """Write a file at the path that the block gets; `path` is the old or the new one, though power fail (`durable`)."""
    temporary = temporary_for(path)
    try:
        yield temporary
        os.replace(temporary, path)
        if durable and os.name == "posix":
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def temporary_for(path: Path) -> Path:
    """Name a temporary file beside `path` that tells which process of which machine writes it."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


@contextmanager
def scratch_directory() -> Generator[Path]:
    """Make a directory for the duration of the block, readable by this user alone."""
    prefix = f"evener-{socket.gethostname()}-"
    common = tempfile.gettempdir()
    for name in (name for name in os.listdir(common) if name.startswith(prefix)):  # there may be thousands of others
        pid = name[len(prefix) :].partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(Path(common, name), ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return isinstance(exc, PermissionError)
    return True


def was_left(number: str) -> bool:
    """Whether a file belongs to an ended process, by the number in its name; ask before this one writes such files."""
    # after a container's restart it may have the number of an earlier one
    return number.isdecimal() and (int(number) == os.getpid() or not is_alive(int(number)))


@cache
def is_library(filename: str) -> bool:
    """Whether a file of a code object or traceback belongs to Python, any environment's packages, or this project."""
    return filename.startswith(_libraries()) or not _INSTALLED.isdisjoint(PurePath(filename).parts)


@cache
def _libraries() -> tuple[str, ...]:
    """What names of library files begin with; Python takes a third of a millisecond to tell where it installs."""
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    rooms = (str(Path(__file__).parents[2] / room) + os.sep for room in ("trainer", "strategies"))
    return (*libraries, *rooms, "<")
