"""Show what a multirun of Hydra's has found: one table over all jobs."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from .variants import Variant, show, write

FILE = "sweep.csv"


class SweepTable(Callback):
    """Hydra callback that prints the table after the last job.

    `sweep.csv` in the sweep's directory is updated after every job, so that it exists even if a job fails.
    """

    unfinished: ClassVar[Path | None] = None
    """Directory of the running sweep."""

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepTable.unfinished = Path(config.hydra.sweep.dir)

    @override
    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        if OmegaConf.select(config, "hydra.mode") is not None and "MULTIRUN" in str(config.hydra.mode):
            home = Path(config.hydra.sweep.dir)
            if jobs := read_jobs(home):
                write(home / FILE, jobs)

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
    """Print the table over all jobs in a sweep's directory, and update its file."""
    configs: list[Any] = [OmegaConf.load(file) for file in home.glob("*/.hydra/config.yaml")]
    show(home / FILE, read_jobs(home), any(cfg.get("monitor_mode") == "max" for cfg in configs), "job")


def read_jobs(home: Path) -> list[Variant]:
    """Read every job of a sweep from its run directory, sorted by number.

    Their overrides are those that differ between jobs, without the strategy, which has its own column.
    """
    jobs = sorted((_read_job(path.parent) for path in home.glob("*/.hydra")), key=lambda job: job.number)
    common = set[str]() if len(jobs) < 2 else set.intersection(*(set(job.overrides) for job in jobs))
    return [
        replace(job, overrides=tuple(w for w in job.overrides if w not in common and not w.startswith("strategy=")))
        for job in jobs
    ]


def _read_job(run_dir: Path) -> Variant:
    hydra: Any = OmegaConf.load(run_dir / ".hydra" / "hydra.yaml").hydra
    overrides = tuple(map(str, hydra.overrides.task))
    return Variant.read(int(hydra.job.num), hydra.runtime.choices.get("strategy", ""), overrides, run_dir)
