"""Make one table of the variants of a configuration that a sweep of Hydra's or a search has run."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from ..job.result import FAILED, FINISHED, RESULT_FILE, Result, new_table, print_table, short_path

COLUMNS = ("job", "strategy", "overrides", "samples/s", "memory MiB", "metric", "value", "epoch")


@dataclass(frozen=True)
class Variant:
    """One run of several: its number, what distinguishes it, and its value of the monitored metric.

    `state` says how it ended if not as it should: `failed`, `diverged` or `pruned`.
    """

    number: int
    strategy: str
    overrides: tuple[str, ...]
    value: float | None
    state: str = ""
    result: Result | None = None

    def cells(self) -> list[str]:
        """One string per column; empty where the variant has no value."""
        value, speed, memory, epoch, metric = "" if self.value is None else f"{self.value:.6g}", "", "", "", self.state
        if result := self.result:
            speed = "" if result.samples_per_s is None else f"{result.samples_per_s:.0f}"
            memory = f"{max(result.peak_memory_mib):.0f}" if result.peak_memory_mib else ""
            epoch = "" if result.monitored_epoch is None else str(result.monitored_epoch)
            metric = metric or result.monitor or ""
        return [str(self.number), self.strategy, " ".join(self.overrides), speed, memory, metric, value, epoch]


def best_of(variants: Sequence[Variant], maximizes: bool) -> Variant | None:
    """The variant with the best value; None if none has one, or if they monitor different metrics."""
    scored = [v for v in variants if not v.state and v.value is not None and not math.isnan(v.value)]
    if len({v.result.monitor for v in scored if v.result}) > 1:
        return None
    sign = -1 if maximizes else 1
    return min(scored, key=lambda v: sign * (v.value or 0.0), default=None)


def show(file: Path, variants: Sequence[Variant], maximizes: bool, kind: str) -> None:
    """Write the table, and print it with the best variant; `kind` is what one is called: job or trial."""
    if not variants:
        return
    with file.open("w", newline="", encoding="utf-8") as table_file:
        csv.writer(table_file).writerows([COLUMNS, *(variant.cells() for variant in variants)])
    best = best_of(variants, maximizes)
    table = new_table(f"{len(variants)} {kind}s", COLUMNS, text=("strategy", "metric"), folded=("overrides",))
    for variant in variants:
        table.add_row(*variant.cells(), style="bold green" if variant is best else None)
    lines: list[str] = []
    if best is not None:
        lines.append(" ".join([f"best: {kind} {best.number}, {best.strategy}", *best.overrides]))
        if best.result is not None and best.result.best_checkpoint:
            lines.append(f"best checkpoint: {short_path(best.result.best_checkpoint)}")
    print_table(table, [*lines, f"table: {short_path(str(file))}"])


class SweepTable(Callback):
    """Hydra callback that writes `sweep.csv` and prints the table after the last job, or the one that fails."""

    unfinished: ClassVar[Path | None] = None
    """Directory of the running sweep."""

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepTable.unfinished = Path(config.hydra.sweep.dir)

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        show_unfinished()


def show_unfinished() -> None:
    """Show the table of the sweep that ends; if a failed job ends it, Hydra does not call its callbacks."""
    home, SweepTable.unfinished = SweepTable.unfinished, None
    if home is not None:
        configs: list[Any] = [OmegaConf.load(file) for file in home.glob("*/.hydra/config.yaml")]
        maximizes = any(cfg.get("monitor_mode") == "max" for cfg in configs)
        show(home / "sweep.csv", read_jobs(home), maximizes, "job")


def read_jobs(home: Path) -> list[Variant]:
    """Read every job of a sweep from its run directory, sorted by number, with the overrides that differ."""
    jobs: list[Variant] = []
    for run_dir in (path.parent for path in home.glob("*/.hydra")):
        hydra: Any = OmegaConf.load(run_dir / ".hydra" / "hydra.yaml").hydra
        words, strategy = tuple(map(str, hydra.overrides.task)), hydra.runtime.choices.get("strategy", "")
        result = Result.read(run_dir) if (run_dir / RESULT_FILE).exists() else None
        if result is None or result.status == FAILED:
            jobs.append(Variant(int(hydra.job.num), strategy, words, None, FAILED))
        else:
            state = "" if result.status == FINISHED else result.status
            jobs.append(Variant(int(hydra.job.num), strategy, words, result.monitored, state, result))
    common = set[str]() if len(jobs) < 2 else set.intersection(*(set(job.overrides) for job in jobs))
    return [
        replace(job, overrides=tuple(w for w in job.overrides if w not in common and not w.startswith("strategy=")))
        for job in sorted(jobs, key=lambda job: job.number)
    ]
