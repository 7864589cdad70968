"""`evener proof`: one page of what was tried on this machine."""

import os
from pathlib import Path

import pytest
import warm_python

COMMAND = "from evener.trainer.cli.tool import main; main()"
WITHOUT_GPUS = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def page(folder: Path, *words: str) -> str:
    done = warm_python.run("-c", COMMAND, "proof", *words, cwd=folder, env=WITHOUT_GPUS, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "proof.html").read_text(encoding="utf-8")


def test_the_page_names_the_machine_and_says_what_could_not_be_run_and_why(tmp_path: Path) -> None:
    found = page(tmp_path, "--only", "gpus")
    assert f"{os.cpu_count()} cores" in found
    assert "torch 2." in found
    assert "not run: this machine has no GPU that torch can use" in found


@pytest.mark.slow
def test_the_page_has_the_tables_of_what_was_run(tmp_path: Path) -> None:
    found = page(tmp_path, "--only", "parity", "--minutes", "40")
    assert "<td><code>fsdp</code></td><td>8</td><td>7</td>" in found
