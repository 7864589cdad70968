"""A second Ctrl-C, while the first one ends the run, leaves no traceback."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from evener.strategies.core import files
from evener.trainer.cli.main import main
from evener.trainer.launch import _elastic


def stopped_agent(*_: Any, **__: Any) -> Any:
    """An agent that ends as torch's does after a first Ctrl-C, with its handlers still installed."""

    def agent(*_: str) -> None:
        signal.signal(signal.SIGINT, lambda *_: pytest.fail("the agent's handler is still there"))
        raise SignalException("SIGINT", signal.SIGINT)

    return agent


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_elastic, "elastic_launch", stopped_agent)
    words = ["strategy=ddp", "devices=2", "accelerator=cpu", f"log_dir={tmp_path}/logs"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("moment", ["while what is lost is found out", "while the directory is removed"])
def test_it_ends_the_command_quietly(
    arguments: None, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The traceback of tempfile, whose clean-up was interrupted; or of the agent's SignalException.
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    if moment == "while the directory is removed":
        monkeypatch.setattr(files.shutil, "rmtree", interrupted)
    else:
        monkeypatch.setattr(_elastic, "stopped", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 128 + signal.SIGINT
    assert "Traceback" not in capsys.readouterr().err
