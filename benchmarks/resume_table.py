"""Kill a training after each of its steps, resume it, and count after how many it ends as if it had not been killed.

    python benchmarks/resume_table.py [--frameworks NAME ...] [--strategies NAME ...] [--loaders NAME ...] [--every 1]

Two epochs of five steps, a checkpoint after every step, SIGKILL to all ranks as the next step begins; equal means the
same samples from there on and the same weights, bit by bit. `9 of 9` is all; of others the first that differs is named.
Frameworks: Evener, and of Lightning, Accelerate, transformers and Ignite what is installed (the extra `benchmarks`).
"""

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # found by the line above, as are the others
from frameworks.attempt import attempt, installed
from frameworks.problem import Problem
from silent_bugs.case import mean_square, perceptron, rows
from silent_bugs.cases.ranks_same_noise import Noise
from silent_bugs.run import NAMES, in_fork, machine

EPOCHS, STEPS = 2, 5
BASE = Problem(perceptron, mean_square, lambda: rows(40), epochs=EPOCHS, save=True)
LOADERS = {
    "in_order": BASE,
    "shuffled": replace(BASE, shuffle=True),
    "noisy_workers": replace(BASE, data=lambda: Noise(40), shuffle=True, workers=2),
}
STRATEGIES = {
    # name: ranks, strategy of Evener; the others have the first two
    "one_device": (1, ""),
    "two_ranks": (2, ""),
    "dp": (1, "dp"),
    "model_parallel": (1, "model_parallel"),
    "fsdp": (2, "fsdp"),
}
OF_ALL = ("one_device", "two_ranks")


def cell(framework: str, problem: Problem, every: int, folder: Path) -> str:
    """How many kills a framework survives; what differs first, if anything does."""
    whole, equal, said = attempt(framework, problem, folder / "whole"), 0, ""
    if not whole.outcomes:
        return f"not run: {whole.error[:80] or 'hangs'}"
    kills = range(1, EPOCHS * STEPS, every)
    for kill in kills:
        attempt(framework, problem, folder / str(kill), kill)
        resumed = attempt(framework, problem, folder / str(kill))
        differs = [
            "order"
            if a["seen"][kill:] != b["seen"]
            else "weights"
            if not torch.equal(a["weights"], b["weights"])
            else ""
            for a, b in zip(whole.outcomes, resumed.outcomes, strict=False)
        ] or ["an error"]
        equal += not any(differs)
        said = said or next((f"; after step {kill}: {what}" for what in differs if what), "")
        shutil.rmtree(folder / str(kill))
    return f"{equal} of {len(kills)}{said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--loaders", nargs="+", default=list(LOADERS), choices=list(LOADERS))
    parser.add_argument("--every", type=int, default=1, help="steps between two kills")
    given = parser.parse_args()
    since, names = time.monotonic(), [name for name in given.frameworks if name in installed()]
    print("| strategy | loader | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|", sep="\n", flush=True)
    for strategy in given.strategies:
        for loader in given.loaders:
            ranks, name = STRATEGIES[strategy]
            problem = replace(LOADERS[loader], ranks=ranks, strategy=name)
            cells = [
                in_fork(framework, cell, framework, problem, given.every) or "not run: can't be imported"
                if framework == "evener" or strategy in OF_ALL
                else ""
                for framework in names
            ]
            print(f"| {strategy} | {loader} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{machine()}. {time.monotonic() - since:.0f} s.")


if __name__ == "__main__":
    main()
