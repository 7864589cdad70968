"""What needs a configuration only is answered without importing torch or Lightning."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.trainer.cli import train as command
from evener.trainer.cli.main import LAUNCHER_VARIABLES, main

ROOT = Path(__file__).parents[3]
SCRIPT = """
import runpy, sys
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as exc:
    print("ended:", exc.code)
print("imported:", sorted({"torch", "pytorch_lightning", "lightning", "scipy"} & set(sys.modules)))
"""


def answer(*words: str, **env: str) -> str:
    # what torch leaves behind where it has trained in this process, such as MASTER_PORT, says that a launcher is there
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    clean["KUBERNETES_PORT"] = "tcp://10.0.0.1:443"  # as in every pod, launched or not
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], cwd=ROOT, env={**clean, **env}, timeout=300, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--help"], "== Groups =="),
        (["--cfg", "job"], "strategy:"),
        (["--cfg", "job", "checkpoint.async=true"], "  background: true"),
        (["--cfg", "job", "ckpt_path=last"], "resume: last"),
        (["module.lrr=1"], "module.lrr is unknown"),
        (["strategy=nope"], "strategy=nope is unknown. Choose one of: balanced_ddp,"),
        (["trainer.max_epochs=abc"], "trainer.max_epochs=abc is not allowed. Give a whole number"),
        (["mode=evaluate"], "mode=evaluate is unknown"),
        (["precision=fp16"], "precision=fp16 is unknown. Did you mean 16-mixed?"),
        (["trainer.precision=fp16"], "trainer.precision=fp16 is unknown. Did you mean 16-mixed?"),
        (["precision=foo"], "precision=foo is not allowed. Give 64, 32, 16, transformer-engine"),
        (["devices=1.5"], "devices=1.5 is not allowed. Give a whole number"),
        (["data.batch_size=abc"], "data.batch_size=abc is not allowed. Give a whole number >= 1"),
        (["module.lr=abc"], "module.lr=abc is not allowed. Give a number >= 0"),
        (["+lr=0.1"], "lr is read by nothing"),
    ],
)
def test_an_answer_of_the_configuration_needs_neither_torch_nor_lightning(words: list[str], told: str) -> None:
    said = answer(*words)
    assert told in said
    assert "imported: []" in said


def test_tab_completion_needs_neither_torch_nor_lightning() -> None:
    said = answer("-sc", "query=bash", COMP_LINE="train.py strategy=balanced_d")
    assert "strategy=balanced_dp" in said
    assert "strategy=balanced_ddp" in said
    assert "imported: []" in said


def test_the_face_of_the_trainer_is_whole() -> None:
    code = "import evener.trainer as face; print(*(getattr(face, name).__name__ for name in face.__all__))"
    done = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ConfigError", "Result", "Trainer", "compose", "main", "train"]


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
