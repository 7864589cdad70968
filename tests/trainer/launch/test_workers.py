"""A launcher that is interrupted again while it ends, ends soon and quietly."""

import signal
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from evener.trainer.cli.main import main
from evener.trainer.launch import launcher
from evener.trainer.launch.launcher import Workers


def test_a_second_ctrl_c_ends_the_command_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    # workers that have ended after a first Ctrl-C
    heard = {"signum": signal.SIGINT, "since_s": inf}
    monkeypatch.setattr(Workers, "run", lambda workers: vars(workers.requests).update(heard))
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
