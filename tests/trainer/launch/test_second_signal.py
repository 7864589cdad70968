"""A second Ctrl-C, while the first one ends the run, leaves no traceback."""

import signal
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from evener.strategies.core import files
from evener.trainer.cli.main import main
from evener.trainer.launch import launcher
from evener.trainer.launch.launcher import Workers


@pytest.mark.parametrize("moment", ["while what is lost is found out", "while the directory is removed"])
def test_a_second_ctrl_c_ends_the_command_quietly(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The traceback of tempfile, whose clean-up was interrupted.
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    # workers that have ended after a first Ctrl-C
    heard = {"signum": signal.SIGINT, "since_s": inf}
    monkeypatch.setattr(Workers, "run", lambda workers: vars(workers.requests).update(heard))
    if moment == "while the directory is removed":
        monkeypatch.setattr(files.shutil, "rmtree", interrupted)
    else:
        monkeypatch.setattr(launcher, "stopped", interrupted)
    words = ["strategy=ddp", "devices=2", "accelerator=cpu", f"log_dir={tmp_path}/logs"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 128 + signal.SIGINT
    assert "Traceback" not in capsys.readouterr().err
