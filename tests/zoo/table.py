"""Renew the zoo's tables of verdicts: `python tests/zoo/table.py docs/dev/zoo.md`, about ten minutes on two cores."""

import sys
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from metric_cases import LEFT_OUT, names
from model_cases import CASES
from zoo import STRATEGIES, Zoo

PACKAGES = ("torch", "pytorch-lightning", "torchmetrics", "transformers", "torchvision", "timm", "torch-geometric")


def main(page: Path) -> None:
    """Write the tables behind what stands above the page's first section."""
    zoo, versions = Zoo(), {one.name.replace("_", "-"): one.version for one in distributions()}
    lines = ["With " + ", ".join(f"{name} {versions.get(name, '(absent)')}" for name in PACKAGES) + "."]
    for title, cases in (("Models", list(CASES)), ("Metrics of torchmetrics", names())):
        lines += ["", f"## {title}", "", f"| | {' | '.join(STRATEGIES)} |", "|---" * (len(STRATEGIES) + 1) + "|"]
        for name in cases:
            found = [zoo.of(name, strategy) for strategy in STRATEGIES]
            cells = [f"{one.word}{'¹' * one.own_steps}" for one in found]
            lines.append(f"| {name} | {' | '.join(cells)} |")
            details = dict.fromkeys(one.detail for one in found if one.detail)
            sys.stderr.write(f"{lines[-1]} {' '.join(details)}\n")
    zoo.pool.restart()
    lines += ["", "## Without a case", "", *(f"- {name}: {reason}" for name, reason in LEFT_OUT.items())]
    head = page.read_text(encoding="utf-8").partition("\n## ")[0].partition("\nWith ")[0].rstrip()
    page.write_text("\n".join([head, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
