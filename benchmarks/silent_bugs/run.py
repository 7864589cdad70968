"""Train what trainers are known to get wrong without a word, and say of each framework what it does.

    python benchmarks/silent_bugs/run.py [--only NAME ...] [--frameworks NAME ...] [--seconds S] [--json FILE]

| word | |
|---|---|
| exact | as a loop written by hand on one device, on the same batches; resumed: as if not killed |
| refused | an error that ends the training |
| warned | something else, after a warning that names it |
| silent | something else |
| hangs | did not end, twice |
| – | not installed, the case makes no sense there, or no time was left |

Frameworks: Evener, and of Lightning, Accelerate, transformers and Ignite what is installed (the extra `benchmarks`).
"""

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402  # found by the line above, as are the others
from frameworks.attempt import FRAMEWORKS, Attempt, attempt, end_with_parent, installed, load  # noqa: E402
from frameworks.by_hand import reference  # noqa: E402
from silent_bugs.case import Case  # noqa: E402

NAMES = [name for name in FRAMEWORKS if name != "by hand"]
RELATIVE = 1e-9
WORDS = ("exact", "refused", "warned", "silent", "hangs", "–")
PACKAGES = ("evener", "torch", "pytorch-lightning", "accelerate", "transformers", "pytorch-ignite")


def all_cases() -> dict[str, Case]:
    """The cases, by the names of their files."""
    names = sorted(path.stem for path in (HERE / "cases").glob("[!_]*.py"))
    return {name: importlib.import_module(f"silent_bugs.cases.{name}").CASE for name in names}


def judge(case: Case, framework: str, folder: Path) -> tuple[str, str]:
    """Train a case with a framework; returns a word of `WORDS`, and why."""
    if framework in case.without:
        return "–", case.without[framework]
    found = _judge(case, framework, folder / "first")
    return _judge(case, framework, folder / "second") if found[0] == "hangs" else found


def _judge(case: Case, framework: str, folder: Path) -> tuple[str, str]:
    found = attempt(framework, case.problem, folder / "whole")
    attempts = [found]
    if case.again:
        attempts.append(attempt(framework, case.again, folder / "again"))
    if case.kill_after:
        if case.kill_after > 0:
            attempt(framework, case.problem, folder / "killed", case.kill_after)
        attempts.append(attempt(framework, case.problem, folder / ("killed" if case.kill_after > 0 else "whole")))
    for made in attempts:
        if made.hung or not made.outcomes:
            return ("hangs", "") if made.hung else ("refused", made.error or made.output[-500:])
    said = difference(case, attempts, folder)
    if said and case.warning and re.search(case.warning, attempts[-1].output, re.DOTALL):
        return "warned", said
    return ("silent", said) if said else ("exact", "")


def difference(case: Case, attempts: list[Attempt], folder: Path) -> str:
    """What is not as it should be; empty if all is."""
    whole, last = attempts[0].outcomes, attempts[-1].outcomes
    if case.property:
        return case.property([outcome for made in attempts for outcome in made.outcomes])
    if not case.kill_after:
        problem = reference(case.problem, [outcome["seen"] for outcome in last])
        num = sum(map(len, problem.batches or []))
        if num < len(case.problem.data()):
            return f"{len(case.problem.data()) - num} samples were not trained"
        whole = attempt("by hand", problem, folder / "reference").outcomes * len(last)
    done = (case.kill_after if case.kill_after > 0 else len(whole[0]["seen"])) * case.problem.accumulate
    for expected, outcome in zip(whole, last, strict=True):
        for key in case.compare:
            a, b = expected.get(key), outcome.get(key)
            if key == "seen":
                a = a[done:]
            elif key == "validated":  # a validation that is due after the step before the kill may come again
                a, b = a[-len(b) :] if b else a, b
                a = a if len(b) % len(set(a)) == 0 else "whole validations"
            if said := unequal(key, a, b, exactly=bool(case.kill_after)):
                return said
    return ""


def unequal(key: str, a: Any, b: Any, exactly: bool) -> str:
    """How what was found differs from what was expected; empty if it does not."""
    if isinstance(a, torch.Tensor | float) and b is not None:
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        apart = ((a - b).abs().max() / a.abs().max()).item()
        return f"{key} differs by {apart:.2g}" if apart > (0.0 if exactly else RELATIVE) else ""
    return "" if a == b else f"{key}: {str(b)[:80]} in place of {str(a)[:80]}"


def judge_all(framework: str, cases: dict[str, Case], seconds: float, folder: Path) -> dict[str, tuple[str, str]]:
    """All cases that begin within a time."""
    found: dict[str, tuple[str, str]] = {}
    deadline = time.monotonic() + seconds
    for name, case in cases.items():
        in_time = time.monotonic() < deadline
        found[name] = judge(case, framework, folder / name) if in_time else ("–", "no time left")
        print(f"{framework:13s} {name:32s} {found[name][0]:8s} {found[name][1][:150]}", file=sys.stderr)
    return found


def in_fork(framework: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call in a process that imports this framework only, a folder behind the arguments; JSON brings the result.

    It is None where the call fails, or where the framework can't be imported, which is told.
    """
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        with os.fdopen(reading) as file:
            found = file.read()
        os.waitpid(pid, 0)
        return json.loads(found) if found else None
    status = 1
    try:
        end_with_parent()
        load(framework)
        folder = Path(tempfile.mkdtemp())  # `TemporaryDirectory` would be removed at the end of each fork
        found = call(*args, folder)
        shutil.rmtree(folder)
        with os.fdopen(writing, "w") as file:
            json.dump(found, file)
        status = 0
    except Exception:  # noqa: BLE001  # the end of this process
        traceback.print_exc()
    finally:
        os._exit(status)


def table(found: dict[str, dict[str, tuple[str, str]]], cases: dict[str, Case]) -> str:
    """Cases by frameworks, and the numbers of each word."""
    names = list(found)
    lines = ["| case | what goes wrong | report | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for name, case in cases.items():
        reports = ", ".join(map(_link, case.issue.split()))
        words = [found[framework][name][0] for framework in names]
        cells = " | ".join(f"**{word}**" if word == "exact" else word for word in words)
        lines.append(f"| `{name}` | {case.wrong} | {reports} | {cells} |")
    for word in WORDS:
        counts = [sum(words[0] == word for words in found[framework].values()) for framework in names]
        lines.append(f"| {word} | | | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _link(issue: str) -> str:
    repository, number = issue.split("#")
    return f"[{repository.split('/')[1]} #{number}](https://github.com/{repository}/issues/{number})"


def machine() -> str:
    """The versions and the machine, in one line."""
    versions = [f"{name} {version(name)}" for name in PACKAGES if _is_installed(name)]
    return f"Python {platform.python_version()}, {', '.join(versions)}; {os.cpu_count()} cores, {platform.system()}"


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of cases, or beginnings of names")
    parser.add_argument("--frameworks", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--seconds", type=float, default=1e6, help="for all; cases that have not begun are left out")
    parser.add_argument("--json", type=Path, help="file for the words and what was seen")
    given = parser.parse_args()
    cases = {name: case for name, case in all_cases().items() if name.startswith(tuple(given.only or [""]))}
    since, there = time.monotonic(), [name for name in given.frameworks if name in installed()]
    found = {
        name: (name in there and in_fork(name, judge_all, name, cases, given.seconds / len(there)))
        or dict.fromkeys(cases, ("–", "not installed"))
        for name in given.frameworks
    }
    print(table(found, cases))
    print(f"\n{machine()}. {len(cases)} cases, {time.monotonic() - since:.0f} s.")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(any(word in ("silent", "hangs") for word, _ in found.get("evener", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
