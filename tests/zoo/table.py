"""Write the zoo's table of verdicts: `python tests/zoo/table.py docs/dev/zoo.md`, about ten minutes on two cores.

Rows that say WRONG, CRASHED, REFUSED LATE or HUNG are defects of today, and stand until the table is written anew.
"""

import argparse
import importlib.metadata
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import metric_cases
import model_cases
import torch
from zoo import STRATEGIES, Verdict, Word, Zoo

PACKAGES = ["torch", "pytorch-lightning", "torchmetrics", "transformers", "torchvision", "timm", "torch_geometric"]

HEAD = """# The zoo: models and metrics that nobody here wrote

Each case trains two epochs of 11 samples in batches of 4, 4 and 3 (float64, CPU, dropout 0) and validates after each,
with stock `pl.Trainer` on one device and then with our Trainer. Compared are weights, the loss of each step, all that
is logged by steps and by epochs, and predictions. **equal**: all to 1e-10 (1e-5 where the library itself computes in
float32). **refused**: an error of ours before the first optimizer step. Any other word is a defect.

`dp`: 2 devices; `balanced_dp`: 2 devices with `gpu0_chunk=0`; `ddp`: 2 ranks with `batch_size_is=global`;
`model_parallel`: 2 stages and 2 micro-batches. **equal¹**: but for the values of single steps, which under ranks are
rank 0's own, as in Lightning.

Written by `python tests/zoo/table.py docs/dev/zoo.md` in an environment of its own, with {versions}:

```bash
pip install torch==2.13.0 -e ".[test,zoo]"
pip install --no-deps --no-build-isolation torch_linear_assignment  # for ClusterAccuracy
pip install --no-deps torchvision==0.28.0 && tests/zoo/torchvision_on_cpu.sh  # the registry has a CUDA build only
pytest -m slow tests/zoo
```
"""

TITLES = {"models": "Models", "metrics": "Metrics of torchmetrics"}


class Notes:
    """Footnotes; the same text is the same note."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self._texts.setdefault(text, len(self._texts) + 1)}]"

    def lines(self) -> Iterator[str]:
        return (f"{number}. {text}" for text, number in self._texts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--section", choices=["models", "metrics"], help="one section only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    zoos = {
        "models": Zoo([name for name in model_cases.CASES if args.only in name], model_cases.case),
        "metrics": Zoo([name for name in metric_cases.names() if args.only in name], metric_cases.case),
    }
    wanted = [args.section] if args.section else list(zoos)
    sections = [line for name in wanted for line in section(TITLES[name], zoos[name])]
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    args.path.write_text("\n".join([HEAD.format(versions=versions), *sections, *left_out()]) + "\n")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(absent)"


def section(title: str, zoo: Zoo) -> Iterator[str]:
    """A count by strategy, the names of the cases that are equal everywhere, and a table of the others."""
    verdicts = {name: verdicts_of(zoo, name) for name in zoo.names}
    notes = Notes()
    yield f"## {title}\n"
    yield from counts(verdicts)
    equal = [name for name, row in verdicts.items() if all(one.word is Word.EQUAL for one in row)]
    yield f"\nEqual under all: {', '.join(equal) or 'none'}.\n"
    yield f"| | {' | '.join(STRATEGIES)} |"
    yield f"|---|{'---|' * len(STRATEGIES)}"
    for name, row in verdicts.items():
        if name not in equal:
            yield f"| {name} | {' | '.join(cell(one, notes) for one in row)} |"
    yield ""
    yield from notes.lines()
    yield ""


def verdicts_of(zoo: Zoo, name: str) -> list[Verdict]:
    row = [zoo.verdict(name, strategy) for strategy in STRATEGIES]
    sys.stderr.write(f"{name}: {' | '.join(str(one) for one in row)}\n")
    return row


def counts(verdicts: dict[str, list[Verdict]]) -> Iterator[str]:
    yield f"{len(verdicts)} cases:\n"
    yield f"| | {' | '.join(word.value for word in Word)} |"
    yield f"|---|{'---|' * len(Word)}"
    for column, strategy in enumerate(STRATEGIES):
        found = Counter(row[column].word for row in verdicts.values())
        yield f"| {strategy} | {' | '.join(str(found[word]) for word in Word)} |"


def cell(verdict: Verdict, notes: Notes) -> str:
    if verdict.word is Word.EQUAL:
        return "equal¹" if verdict.detail else "equal"
    detail = verdict.detail.replace("|", "\\|")
    bold = "" if verdict.holds else "**"
    return f"{bold}{verdict.word.value}{bold} {notes.mark(detail)}"


def left_out() -> Iterator[str]:
    yield "## Without a case\n"
    reasons: dict[str, list[str]] = {}
    for name, reason in metric_cases.LEFT_OUT.items():
        reasons.setdefault(reason, []).append(name)
    yield from (f"- {reason}: {', '.join(names)}" for reason, names in reasons.items() if "see" not in reason)


if __name__ == "__main__":
    main()
