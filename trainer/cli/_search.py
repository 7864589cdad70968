"""Run a search for hyperparameters and show its table: `hparams_search=optuna`."""

import csv
import importlib.util
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.table import Table

from ...strategies import ConfigError
from ..job.hparams_search import Search, last_value
from ..job.log_file import run_log
from ..job.result import short_path
from ..launch import cluster
from .sweep_table import wide_console
from .train import default_run_dir, inside_hydra, train


def run_search(cfg: DictConfig) -> float | None:
    """Run the trials, print their table, and return the best value of the monitored metric.

    Raises:
        ConfigError: the search can't run here, an option can't be honoured, or no trial finished.
    """
    if cluster.detect() is not None:
        raise ConfigError("hparams_search must run in a single process. Start it without torchrun or srun.")
    home = Path(cfg.run_dir if inside_hydra(cfg) else default_run_dir(cfg)).absolute()
    search = Search(cfg, home)
    search.open()
    try:
        with run_log(home):
            search.run(train)
    finally:
        show_search(search)
    if (best := search.best()) is None:
        raise ConfigError(f"hparams_search: none of {len(search.study.trials)} trials finished; see {home}.")
    return best.value


def columns(search: Search) -> list[str]:
    """Headings of the table."""
    return ["trial", *search.space, "state", "seconds", search.cfg.monitor]


def cells(search: Search, trial: Any) -> list[str]:
    """One string per column; a pruned trial shows its last value."""
    values = [trial.params.get(key, "") for key in search.space]
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    seconds = "" if trial.duration is None else f"{trial.duration.total_seconds():.1f}"
    value = last_value(trial)
    return [str(trial.number), *shown, trial.state.name.lower(), seconds, "" if value is None else f"{value:.6g}"]


def show_search(search: Search) -> None:
    """Print the table, and write it as `search.csv` and, if Pillow is installed, as `search.png`."""
    trials, best = search.study.trials, search.best()
    if not trials:
        return
    names, rows = columns(search), [cells(search, trial) for trial in trials]
    table = Table(title=f"{len(trials)} trials", title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name == "state" else "right")
    for trial, row in zip(trials, rows, strict=True):
        table.add_row(*row, style="bold green" if best and trial.number == best.number else None)
    with (search.run_dir / "search.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])
    if importlib.util.find_spec("PIL") is not None:
        from ._sweep_picture import draw

        draw(search.run_dir / "search.png", names, rows, bar_column=len(names) - 1)
    console = wide_console()
    console.print(table)
    if best is not None:
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        console.print(f"best: trial {best.number}, {search.cfg.monitor} {best.value:.6g}: {values}", soft_wrap=True)
        if result := search.results.get(best.number):
            console.print(f"best checkpoint: {short_path(result.best_checkpoint)}", soft_wrap=True)
    console.print(f"table: {short_path(str(search.run_dir / 'search.csv'))}", soft_wrap=True)
