"""Summarize a multirun: one table over all jobs, on the console, as CSV and as an image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from ..job import tables
from ..job.result import DIVERGED, FAILED, RESULT_FILE, Result

COLUMNS = ("job", "strategy", "overrides", "samples/s", "memory MiB", "metric", "value")


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Args:
        number: Hydra's number of the job, from 0.
        overrides: as given on the command line.
        strategy: the strategy's name in the configuration.
        maximizes: whether larger values of the monitored metric are better.
        result: its outcome; None if it failed.
    """

    number: int
    overrides: tuple[str, ...]
    strategy: str
    maximizes: bool
    result: Result | None

    def cells(self) -> list[str]:
        """One string per column; empty where the job has no value."""
        result = self.result
        if result is None:
            return [str(self.number), self.strategy, " ".join(self.overrides), "", "", "failed", ""]
        speed = "" if result.samples_per_s is None else f"{result.samples_per_s:.0f}"
        memory = f"{max(result.peak_memory_mib):.0f}" if result.peak_memory_mib else ""
        value = "" if result.monitored is None else f"{result.monitored:.6g}"
        overrides = " ".join(self.overrides)
        return [str(self.number), result.strategy, overrides, speed, memory, result.monitor or "", value]


class SweepTable(Callback):
    """Hydra callback that prints the table after the last job.

    `sweep.csv` and `sweep.png` in the sweep's directory are updated after every job, so they exist even if a job fails.
    The image needs Pillow, which TensorBoard installs.
    """

    unfinished: ClassVar[Path | None] = None
    """Directory of the running sweep."""

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepTable.unfinished = Path(config.hydra.sweep.dir)

    @override
    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        if OmegaConf.select(config, "hydra.mode") is not None and "MULTIRUN" in str(config.hydra.mode):
            write_files(Path(config.hydra.sweep.dir))

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        SweepTable.unfinished = None
        show_table(Path(config.hydra.sweep.dir))


def show_unfinished() -> None:
    """Show the table of a sweep that a failed job ended; Hydra does not call its callbacks then."""
    home, SweepTable.unfinished = SweepTable.unfinished, None
    if home is not None:
        show_table(home)


def show_table(home: Path) -> None:
    """Print the table over all jobs of a sweep and update its files.

    Args:
        home: the sweep's directory.
    """
    jobs = write_files(home)
    if not jobs:
        return
    table = tables.new_table(f"{len(jobs)} jobs", COLUMNS, text=("strategy", "metric"), folded=("overrides",))
    best = best_job(jobs)
    for job in jobs:
        table.add_row(*job.cells(), style="bold green" if job is best else None)
    found = [] if best is None else [" ".join([f"best: job {best.number}, {best.cells()[1]}", *best.overrides])]
    tables.show(table, [*found, f"table: {home / 'sweep.csv'}"])


def write_files(home: Path) -> list[Job]:
    """Write the table's files, if there are jobs in a sweep's directory, and return those."""
    jobs = read_jobs(home)
    if jobs:
        tables.write_files(home / "sweep", COLUMNS, [job.cells() for job in jobs], COLUMNS.index("samples/s"))
    return jobs


def read_jobs(home: Path) -> list[Job]:
    """Read every job of a sweep from its run directory, sorted by number."""
    jobs = sorted((read_job(path.parent) for path in home.glob("*/.hydra")), key=lambda job: job.number)
    return [replace(job, overrides=differing(job, jobs)) for job in jobs]


def differing(job: Job, jobs: Sequence[Job]) -> tuple[str, ...]:
    """The overrides that differ between jobs, without the strategy, which has its own column."""
    own = [override for override in job.overrides if not override.startswith("strategy=")]
    return tuple(override for override in own if len(jobs) == 1 or any(override not in j.overrides for j in jobs))


def read_job(run_dir: Path) -> Job:
    """Read one job of a sweep from its run directory."""
    hydra: Any = OmegaConf.load(run_dir / ".hydra" / "hydra.yaml")
    config: Any = OmegaConf.load(run_dir / ".hydra" / "config.yaml")
    strategy: str = hydra.hydra.runtime.choices.get("strategy", "")
    overrides = OmegaConf.to_container(hydra.hydra.overrides.task)
    assert isinstance(overrides, list)
    result = Result.read(run_dir) if (run_dir / RESULT_FILE).exists() else None
    return Job(
        number=int(hydra.hydra.job.num),
        overrides=tuple(str(override) for override in overrides),
        strategy=strategy,
        maximizes=config.get("monitor_mode") == "max",
        result=None if result is None or result.status == FAILED else result,
    )


def best_job(jobs: Sequence[Job]) -> Job | None:
    """The job with the best monitored metric; None if no job has one or they monitor different metrics.

    A job that diverged is never the best.
    """
    values = [(job.result.monitored, job) for job in jobs if job.result and job.result.status != DIVERGED]
    scored = [(value, job) for value, job in values if value is not None and not math.isnan(value)]
    if len({job.result.monitor for _, job in scored if job.result}) != 1:
        return None
    choose = max if scored[0][1].maximizes else min
    return choose(scored, key=lambda pair: pair[0])[1]
