"""The programs beside the product, in their short forms here and in longer ones under `-m slow`."""

import ast
import importlib
import os
import re
import sys
from pathlib import Path

import pytest
import warm_python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_what_benchmarks_import_of_this_package_is_there(path: Path) -> None:
    # The check of plans imported a function that was gone, which was seen on a GPU only.
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "evener":
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.slow
def test_the_check_for_gpus_passes_on_cpus() -> None:
    done = warm_python.run(BENCHMARKS / "gpu_check.py", "--cpu", timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line.split()[0] for line in done.stdout.partition("\n\n")[0].splitlines()]
    assert verdicts.count("passed") >= 10
    assert set(verdicts) == {"passed", "skipped"}
    assert "| parity.dp.twice | passed | largest difference" in done.stdout


def fails(devices: list[str]) -> str:
    raise AssertionError(f"no luck on {devices}")


def test_a_check_for_gpus_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("gpu_check")
    found = program.run_apart(program.Check("a", fails, (0, -1)), True)
    assert found == ("failed", "AssertionError: no luck on ['cpu', 'cpu']")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("gpus", [f"{os.cpu_count()} cores", "torch 2.", "not run: this machine has no GPU that torch can use"]),
        pytest.param("parity --minutes 40", ["<td><code>fsdp</code></td><td>8</td><td>7</td>"], marks=pytest.mark.slow),
    ],
)
def test_the_page_of_proof_has_what_was_run_where_and_what_was_not_and_why(
    words: str, texts: list[str], tmp_path: Path
) -> None:
    command = "from evener.trainer.cli.tool import main; main()"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = warm_python.run("-c", command, "proof", "--only", *words.split(), cwd=tmp_path, env=env, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "proof.html").read_text(encoding="utf-8")
    assert [text for text in texts if text not in page] == []


def silent_bugs(*words: str) -> dict[str, str]:
    """Train cases that trainers get wrong without a word with Evener; the verdict on each."""
    done = warm_python.run(BENCHMARKS / "silent_bugs/run.py", "--frameworks", "evener", *words, timeout=900)
    found = re.findall(r"^\| `(\w+)` \|.* \| \**(\w+)\** \|$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return dict(found)


def test_a_few_silent_bugs_are_not_evener_s() -> None:
    names = ("accumulated_mask", "ranks_tokens", "ranks_uneven", "resume_second_epoch")
    assert silent_bugs("--only", *names) == dict.fromkeys(names, "exact")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_silent_bug_is_evener_s_but_the_one_that_is_documented() -> None:
    found = silent_bugs()
    assert len(found) >= 44
    assert {name: word for name, word in found.items() if word != "exact"} == {
        "accumulated_contrast": "silent",  # docs/over_batch.md: each forward pass has its own batch
        "ranks_moved": "refused",  # within a step, in which ranks can't be joined anew
        "ranks_static_graph_manual": "refused",
    }


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a run in /proc")


def survive(*words: str) -> tuple[int, dict[str, int]]:
    """Disturb runs and damage files; the status of the program and its table."""
    done = warm_python.run(BENCHMARKS / "survival.py", "--commands", "0", *words, timeout=550)
    table = {name: int(number) for name, number in re.findall(r"^\| (.+) \| (\d+) \|$", done.stdout, re.MULTILINE)}
    assert table, done.stdout + done.stderr
    return done.returncode, table


@needs_proc
@pytest.mark.long
def test_a_few_disturbances_and_damaged_files_are_survived() -> None:
    status, table = survive("--kills", "3", "--per-run", "2", "--jobs", "3", "--files", "200", "--seed", "5")
    bad = ("different", "lost", "hung", "orphans", "failed", "files found though damaged",
           "files read though damaged", "files that crashed", "files that ran code")  # fmt: skip
    assert {name: table[name] for name in bad} == dict.fromkeys(bad, 0)
    assert status == 0
    assert table["kill"] >= 3
    assert table["bitwise equal"] == table["runs"]
    assert table["files damaged"] == table["files passed over"] + table["files read as they were"] == 200


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("defect", ["different", "lost", "hung", "orphans"])
def test_a_defect_is_found(defect: str) -> None:
    status, table = survive("--kills", "5", "--jobs", "2", "--files", "0", "--end-s", "10", "--sabotage", defect)
    assert table[defect] > 0
    assert status == 1
