"""A launcher whose worker is frozen, or that is interrupted again while it ends, goes on soon and quietly."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from evener.trainer.cli.main import main
from evener.trainer.launch import launcher
from evener.trainer.launch.launcher import Workers, is_frozen


@pytest.fixture
def frozen() -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    while not is_frozen(process.pid):
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process is stopped is read from /proc")
def test_a_frozen_worker_is_killed_where_all_may_be_started_again(frozen: BaseProcess) -> None:
    # the others waited for it as long as for a network, strategy.timeout_s
    launcher = {"monitor_interval_s": 0.01, "shutdown_timeout_s": 60, "max_restarts": 1}
    workers = Workers(OmegaConf.create({"launcher": launcher}), 1, forks=True)
    workers.processes.append(frozen)
    assert workers.join() == 0
    assert frozen.exitcode == -signal.SIGKILL


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
