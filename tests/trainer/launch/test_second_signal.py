"""A second Ctrl-C, while the first one ends the run, leaves no traceback."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.strategies.core import files
from evener.trainer.cli.main import main
from evener.trainer.launch import launcher
from evener.trainer.launch.launcher import Workers


def stopped_run(workers: Workers) -> None:
    """Workers that have ended after a first Ctrl-C."""
    workers.requests.receive(signal.SIGINT)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Workers, "run", stopped_run)
    words = ["strategy=ddp", "devices=2", "accelerator=cpu", f"log_dir={tmp_path}/logs"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("moment", ["while what is lost is found out", "while the directory is removed"])
def test_it_ends_the_command_quietly(
    arguments: None, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The traceback of tempfile, whose clean-up was interrupted.
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    if moment == "while the directory is removed":
        monkeypatch.setattr(files.shutil, "rmtree", interrupted)
    else:
        monkeypatch.setattr(launcher, "stopped", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 128 + signal.SIGINT
    assert "Traceback" not in capsys.readouterr().err
