"""A short form of `benchmarks/survival.py`: what it does to runs and files is survived, and a defect is found."""

import re
import sys
from pathlib import Path

import pytest
import warm_python

PROGRAM = Path(__file__).parents[1] / "benchmarks/survival.py"
BAD = ("different", "lost", "hung", "orphans", "failed")
BAD_FILES = ("files found though damaged", "files read though damaged", "files that crashed", "files that ran code")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a run in /proc")


def survive(*words: str) -> tuple[int, dict[str, int]]:
    """Run the program; return its status and its table."""
    done = warm_python.run(PROGRAM, "--commands", "0", *words, timeout=550)
    table = {name: int(number) for name, number in re.findall(r"^\| (.+) \| (\d+) \|$", done.stdout, re.MULTILINE)}
    assert table, done.stdout + done.stderr
    return done.returncode, table


@pytest.mark.long
def test_a_few_disturbances_and_damaged_files_are_survived() -> None:
    status, table = survive("--kills", "3", "--per-run", "2", "--jobs", "3", "--files", "200", "--seed", "5")
    assert {name: table[name] for name in (*BAD, *BAD_FILES)} == dict.fromkeys((*BAD, *BAD_FILES), 0)
    assert status == 0
    assert table["kill"] >= 3
    assert table["bitwise equal"] == table["runs"]
    assert table["files damaged"] == table["files passed over"] + table["files read as they were"] == 200


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["different", "lost", "hung", "orphans"])
def test_a_defect_is_found(defect: str) -> None:
    status, table = survive("--kills", "5", "--jobs", "2", "--files", "0", "--end-s", "10", "--sabotage", defect)
    assert table[defect] > 0
    assert status == 1
