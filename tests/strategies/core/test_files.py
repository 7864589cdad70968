"""A file is replaced whole; directories of a killed process are removed by the next run; libraries' files are told."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from evener.strategies.core import files
from evener.strategies.core.files import is_library, replacing, scratch_directory


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def named_after(folder: Path, pid: int) -> Path:
    """A directory as that process would have made it."""
    left = folder.with_name(folder.name.replace(f"-{os.getpid()}-", f"-{pid}-"))
    left.mkdir()
    (left / "config.yaml").touch()
    return left


def test_what_a_killed_process_left_is_removed_by_the_next_run(temporary: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with scratch_directory() as folder:
        dead, alive = named_after(folder, ended.pid), named_after(folder, os.getppid())
        other = temporary / "evener-elsewhere"
        other.mkdir()
        with scratch_directory():
            assert folder.exists()
        assert not dead.exists()
        assert alive.exists()
        assert other.exists()
    assert not folder.exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with replacing(path) as temporary:
        temporary.write_text("old")
    with suppress(OSError), replacing(path, durable=True) as temporary:
        temporary.write_text("half")
        raise OSError("the disk is full")
    assert path.read_text() == "old"
    with replacing(path, durable=True) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        # Only the interpreter's own site-packages were libraries: in an environment on top of another, torch's frames
        # were named instead of the user's line.
        ("/somewhere/else/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", True),
        ("<frozen runpy>", True),
        (os.__file__, True),
        (files.__file__, True),
        ("/home/me/site-packages.py", False),
        (__file__, False),
        (os.path.join(sysconfig.get_path("data"), "project", "model.py"), False),
    ],
)
def test_packages_of_any_environment_are_libraries_and_projects_are_not(filename: str, expected: bool) -> None:
    assert is_library(filename) is expected
