"""The program for the first GPU works, as far as CPUs can show it; its short form runs here."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_short_form_passes() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cpu"], capture_output=True, text=True, check=False, timeout=400
    )  # within 60 s on an idle machine
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line.split()[0] for line in done.stdout.partition("\n\n")[0].splitlines()]
    assert verdicts.count("passed") >= 10
    assert set(verdicts) == {"passed", "skipped"}
    assert "| parity.dp.twice | passed | largest difference" in done.stdout


def test_a_check_that_fails_or_takes_too_long_is_told(program: Any) -> None:
    def fails(devices: list[str]) -> str:
        raise AssertionError(f"no luck on {devices}")

    def hangs(devices: list[str]) -> str:
        import time

        time.sleep(60)
        return ""

    def dies(devices: list[str]) -> str:
        import os

        os._exit(7)

    assert program.run_apart(program.Check("a", fails, (0, -1)), True) == (
        "failed", "AssertionError: no luck on ['cpu', 'cpu']",
    )  # fmt: skip
    assert program.run_apart(program.Check("b", hangs, limit_s=0.5), True) == ("failed", "took longer than 0.5 s")
    assert program.run_apart(program.Check("c", dies), True) == ("failed", "ended with status 7")


@pytest.mark.parametrize("path", sorted(SCRIPT.parent.glob("*.py")), ids=lambda path: path.name)
def test_what_benchmarks_import_of_this_package_is_there(path: Path) -> None:
    # the check of plans imported a function that was gone, which was seen on a GPU only
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "evener":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module}.{name.name}"
