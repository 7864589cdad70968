"""A short form of `benchmarks/survival.py`: runs that are killed or frozen, and damaged files, are survived."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks/survival.py"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a run in /proc")
def test_a_few_random_kills_and_damaged_files_are_survived() -> None:
    words = ["--kills", "6", "--per-run", "3", "--files", "200", "--seed", "5"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], timeout=550, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = {name: int(number) for name, number in re.findall(r"^\| (.+) \| (\d+) \|$", done.stdout, re.MULTILINE)}
    assert table["kills"] + table["freezes"] + table["stops"] == 6
    assert table["files damaged"] == 200
    for name in ("different", "lost", "hung", "orphans", "failed", "files accepted altered", "files ran code"):
        assert table[name] == 0
