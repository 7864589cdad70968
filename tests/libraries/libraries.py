"""Train a library's module with stock Lightning and with ours, and say what became of it.

`python tests/libraries/libraries.py chemprop` prints a row of the table, in an environment that has chemprop.
"""

import sys
from pathlib import Path

import evener.trainer  # noqa: F401  # before any library: one that imports `lightning` finds what evener makes of it

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "support"), str(HERE.parents[1] / "zoo")]

from zoo import STRATEGIES, Zoo  # noqa: E402  # found by the line above


def main() -> None:
    zoo = Zoo()
    for library in sys.argv[1:]:
        found = [zoo.of(library, strategy) for strategy in (*STRATEGIES, "fsdp")]
        sys.stdout.write(f"| {library} | {' | '.join(f'{one.word} {one.detail[:300]}'.strip() for one in found)} |\n")
    zoo.pool.restart()


if __name__ == "__main__":
    main()
