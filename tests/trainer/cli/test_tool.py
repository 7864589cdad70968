"""The command `evener`, in this process."""

import re
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from evener.trainer.cli import tool

Command = Callable[..., tuple[Any, str]]


@pytest.fixture
def evener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command; what it exits with, and what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("HYDRA_FULL_ERROR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(words: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["evener", *shlex.split(words)])
        try:
            tool.main()
        except SystemExit as exc:
            return exc.code, capsys.readouterr().out
        return None, capsys.readouterr().out

    return run


def test_the_commands_are_listed_and_others_refused(evener: Command) -> None:
    for words in ("", "--help", "new --help"):
        status, told = evener(words)
        assert status is None
        assert [word for word in ("train", "new", "proof") if f"  evener {word} " not in told] == []
    for words in ("train --help", "proof --help"):
        assert len(evener(words)[1]) > 60
    assert evener("train --version")[1].strip() == evener("--version")[1].strip() == f"evener {version('evener')}"
    for words in ("strategies", "new", "new a b"):
        assert str(evener(words)[0]).startswith(f"Error: evener {words} is unknown.")


def test_a_new_project_is_whole_and_valid_and_not_written_over(
    tmp_path: Path, evener: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told = evener("new 'my project'")
    assert "cd 'my project'\n" in told
    assert "logs/" in Path("my project/.gitignore").read_text(encoding="utf-8").splitlines()
    assert evener("new mine")[0] is None
    files = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert {"train.py", "README.md", "spirals.py", "test_spirals.py", "conf/project.yaml"} <= files
    assert "name: mine" in (tmp_path / "mine" / "conf" / "project.yaml").read_text()
    again = "Error: mine exists already. Give the name of a new folder, such as evener new mine_2."
    assert evener("new mine")[0] == again
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("COLUMNS", "200")
    _, told = evener("train --help strategy=ddp")
    assert re.search(r"^strategy: balanced_ddp, .*\bddp, ", told, re.MULTILINE)
    assert re.search(r"^module: .*\bspirals\b", told, re.MULTILINE)
    assert "\n  hidden: 64\n" in told
