"""The variants of one configuration that a sweep or a search has run, their results, and the table of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..job import tables
from ..job.result import DIVERGED, FAILED, RESULT_FILE, Result, short_path

COLUMNS = ("job", "strategy", "overrides", "samples/s", "memory MiB", "metric", "value", "epoch")


@dataclass(frozen=True)
class Variant:
    """One run of several.

    Args:
        number: of the job or trial, from 0.
        strategy: the strategy's name.
        overrides: what distinguishes it, as on the command line.
        value: of the monitored metric; None if there is none.
        state: how it ended if not as it should: `failed`, `diverged` or `pruned`.
        result: its outcome, if it left one.
    """

    number: int
    strategy: str
    overrides: tuple[str, ...]
    value: float | None
    state: str = ""
    result: Result | None = None

    @classmethod
    def read(cls, number: int, strategy: str, overrides: tuple[str, ...], run_dir: Path) -> "Variant":
        """Read a variant's outcome from its run directory."""
        result = Result.read(run_dir) if (run_dir / RESULT_FILE).exists() else None
        if result is None or result.status == FAILED:
            return cls(number, strategy, overrides, None, FAILED)
        state = DIVERGED if result.status == DIVERGED else ""
        return cls(number, result.strategy, overrides, result.monitored, state, result)

    def cells(self) -> list[str]:
        """One string per column; empty where the variant has no value."""
        result, value = self.result, "" if self.value is None else f"{self.value:.6g}"
        speed, memory, metric, epoch = "", "", "", ""
        if result is not None:
            speed = "" if result.samples_per_s is None else f"{result.samples_per_s:.0f}"
            memory = f"{max(result.peak_memory_mib):.0f}" if result.peak_memory_mib else ""
            epoch = "" if result.monitored_epoch is None else str(result.monitored_epoch)
            metric = result.monitor or ""
        words = " ".join(self.overrides)
        return [str(self.number), self.strategy, words, speed, memory, self.state or metric, value, epoch]


def best_of(variants: Sequence[Variant], maximizes: bool) -> Variant | None:
    """The variant with the best value; None if none has one, or if they monitor different metrics."""
    scored = [v for v in variants if not v.state and v.value is not None and not math.isnan(v.value)]
    if len({v.result.monitor for v in scored if v.result}) > 1:
        return None
    sign = -1 if maximizes else 1
    return min(scored, key=lambda v: sign * (v.value or 0.0), default=None)


def write(file: Path, variants: Sequence[Variant]) -> None:
    """Write the table as a CSV file."""
    tables.write(file, COLUMNS, [variant.cells() for variant in variants])


def show(file: Path, variants: Sequence[Variant], maximizes: bool, kind: str) -> None:
    """Write the table, and print it with the best variant.

    Args:
        file: the table's CSV file.
        kind: what a variant is called: job or trial.
    """
    if not variants:
        return
    write(file, variants)
    best = best_of(variants, maximizes)
    table = tables.new_table(f"{len(variants)} {kind}s", COLUMNS, text=("strategy", "metric"), folded=("overrides",))
    for variant in variants:
        table.add_row(*variant.cells(), style="bold green" if variant is best else None)
    lines: list[str] = []
    if best is not None:
        lines.append(" ".join([f"best: {kind} {best.number}, {best.strategy}", *best.overrides]))
        if best.result is not None and best.result.best_checkpoint:
            lines.append(f"best checkpoint: {short_path(best.result.best_checkpoint)}")
    tables.show(table, [*lines, f"table: {short_path(str(file))}"])
