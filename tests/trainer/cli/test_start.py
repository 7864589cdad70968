"""What needs a configuration only is answered without importing torch or Lightning."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.trainer.cli import train as command
from evener.trainer.cli.main import main
from evener.trainer.launch.cluster import LAUNCHER_VARIABLES

ROOT = Path(__file__).parents[3]
SCRIPT = """
import contextlib, io, json, os, runpy, sys
from evener.trainer.cli import tool

for name, words, environment in json.loads(sys.argv[1]):
    said, before = io.StringIO(), dict(os.environ)
    sys.argv = [name, *words]
    os.environ.update(environment)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            tool.main() if name == "evener" else runpy.run_path(name, run_name="__main__")
        except SystemExit as exc:
            print("ended:", exc.code)
    os.environ.clear()
    os.environ.update(before)
    imported = sorted({"torch", "pytorch_lightning", "lightning", "scipy"} & set(sys.modules))
    print(json.dumps([said.getvalue(), imported]), file=sys.__stdout__)
"""
TRAIN = str(ROOT / "train.py")
ANSWERS: list[tuple[str, list[str], str]] = [
    (TRAIN, ["--help"], "== Groups =="),
    (TRAIN, ["--local-rank=0", "--cfg", "job", "module.lr=0.25"], "lr: 0.25"),  # as torch.distributed.launch adds it
    (TRAIN, ["--cfg", "job", "checkpoint.async=true"], "  background: true"),
    (TRAIN, ["--cfg", "job", "ckpt_path=last"], "resume: last"),
    (TRAIN, ["strategy=nope"], "strategy=nope is unknown. Choose one of: balanced_ddp,"),
    (TRAIN, ["compare.steps=abc"], "compare.steps=abc is not allowed. Give a whole number"),
    (TRAIN, ["-sc", "query=bash"], "strategy=balanced_dp"),
    ("evener", ["--version"], "evener "),
    ("evener", ["train", "--help"], "== Groups =="),
]
"""A command, its words, and what they are answered; a shell that completes words asks by a variable, too."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What all commands say, one after the other in one process, and what is imported after each."""
    # what torch leaves behind where it has trained in this process, such as MASTER_PORT, says that a launcher is there
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    clean["KUBERNETES_PORT"] = "tcp://10.0.0.1:443"  # as in every pod, launched or not
    asks = {"COMP_LINE": "train.py strategy=balanced_d"}
    commands = [(name, words, asks if "-sc" in words else {}) for name, words, _ in ANSWERS]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], cwd=tmp_path_factory.mktemp("home"), env=clean,
        timeout=300, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_answers_of_the_configuration_need_neither_torch_nor_lightning(answers: list[Any]) -> None:
    for (_, words, answer), (said, imported) in zip(ANSWERS, answers, strict=True):
        assert answer in said, words
        assert imported == [], words


@pytest.mark.parametrize("words", [["mode=fit"], ["--cfg", "job"], ["strategy=nope"]])
def test_garbage_is_collected_while_a_job_runs_and_after_the_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[bool] = []
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(command, "run_job", lambda *_: seen.append(gc.isenabled()))
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # Hydra's handlers would outlive this test's streams
    monkeypatch.setattr(sys, "argv", ["train.py", *words, *quiet, f"log_dir={tmp_path}"])
    try:
        main()
    except SystemExit:
        assert words == ["strategy=nope"]
    assert seen == ([True] if words == ["mode=fit"] else [])
    assert gc.isenabled()
