"""Train the corpus under every strategy and print verdicts: `python tests/acceptance/run.py --strategies ddp,dp`."""

import argparse
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytorch_lightning as pl
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support")]

from acceptance.case import FIELDS, all_cases  # noqa: E402  # found by the line above
from acceptance.judge import STRATEGIES, WORDS, Judge, Verdict  # noqa: E402  # as above

Verdicts = dict[str, dict[str, Verdict]]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def judge_all(strategies: list[str], names: list[str], told: bool = True, accelerator: str = "cpu") -> Verdicts:
    """Verdicts by strategy and case."""
    judge, cases, found = Judge(accelerator), all_cases(), {strategy: {} for strategy in strategies}
    try:
        for name in names:
            for strategy in strategies:
                verdict = judge.verdict(cases[name], strategy)
                found[strategy][name] = verdict
                if told:
                    detail = f": {verdict.detail[:600]}" if verdict.detail else ""
                    detail += ", but for values of single steps, which are rank 0's own" * verdict.own_steps
                    case = cases[name]
                    say(f"{case.field}.{name} [{case.expected}] {strategy}: {verdict.word}{detail}")
    finally:
        judge.pool.restart()
    return found


UNTOUCHED = ("equal", "exception")
REMEDIED = (*UNTOUCHED, "remedied")


def holds(verdicts: dict[str, Verdict], words: Sequence[str] = UNTOUCHED) -> float:
    """Percentage of the cases that are one device's: untouched, or with other words counted, too."""
    return 100 * sum(verdict.word in words for verdict in verdicts.values()) / max(1, len(verdicts))


def table(found: Verdicts) -> str:
    """Numbers of verdicts by strategy, as docs show them."""
    words = "equal | documented exception | equal with the remedy | refused | late | raw | wrong, warned | "
    lines = [
        f"| | cases | {words}wrong in silence | holds untouched | holds with the remedy |",
        "|---" * 12 + "|",
    ]
    for strategy, verdicts in found.items():
        count = Counter(verdict.word for verdict in verdicts.values())
        numbers = " | ".join(str(count[word]) for word in WORDS[:-1])
        shares = f"{holds(verdicts):.0f} % | {holds(verdicts, REMEDIED):.0f} %"
        lines.append(f"| `{strategy}` | {len(verdicts)} | {numbers} | {shares} |")
        lines += [f"unsound: {n}: {v.detail}" for n, v in verdicts.items() if v.word == "unsound"]
    return "\n".join(lines)


def renew(page: Path, lines: str) -> None:
    """Write the table, and what it was measured with, in the place of a page's."""
    about = (
        f"{date.today()}, Python {platform.python_version()}, torch {torch.__version__}, Lightning {pl.__version__}, "
        f"{os.cpu_count()} cores, one complete run."
    )
    text, found = re.subn(
        r"^\| \| cases \|.*\n(\|.*\n)+\n.*?one complete run[^.]*\.",
        f"{lines}\n\n{about}", page.read_text(encoding="utf-8"), flags=re.MULTILINE,
    )  # fmt: skip
    if not found:
        raise SystemExit(f"{page} has no such table")
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="of " + ",".join(STRATEGIES))
    parser.add_argument("--only", default="", help="names of cases or of fields, by commas")
    parser.add_argument("--table", choices=["text", "docs"], default="text", help="docs: the table alone")
    parser.add_argument("--accelerator", default="cpu", help="kind of the devices: cpu, late, cuda")
    parser.add_argument("--write", type=Path, help="page whose table is renewed")
    args = parser.parse_args()
    cases, chosen = all_cases(), set(filter(None, args.only.split(",")))
    if unknown := chosen - set(cases) - set(FIELDS):
        parser.error(f"--only: unknown names {', '.join(sorted(unknown))}")
    names = [name for name, case in cases.items() if not chosen or {name, case.field} & chosen]
    start = time.monotonic()
    found = judge_all(args.strategies.split(","), names, args.table == "text", args.accelerator)
    say(f"\n{table(found)}\n\n{len(names)} cases, {time.monotonic() - start:.0f} s")
    if args.write:
        renew(args.write, table(found))


if __name__ == "__main__":
    main()
