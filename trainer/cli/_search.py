"""Run a search for hyperparameters and show its table: `hparams_search=optuna`."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ...strategies import ConfigError
from ..job import tables
from ..job.hparams_search import Search, last_value
from ..job.log_file import run_log
from ..job.result import short_path
from ..launch import cluster
from .train import default_run_dir, inside_hydra, train


def run_search(cfg: DictConfig) -> float | None:
    """Run the trials, print their table, and return the best value of the monitored metric."""
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
    names = ["trial", *search.space, "state", "seconds", str(search.cfg.monitor)]
    rows = [cells(search, trial) for trial in trials]
    table = tables.new_table(f"{len(trials)} trials", names, text=("state",))
    for trial, row in zip(trials, rows, strict=True):
        table.add_row(*row, style="bold green" if best and trial.number == best.number else None)
    tables.write_files(search.run_dir / "search", names, rows, bar_column=len(names) - 1)
    lines: list[str] = []
    if best is not None:
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        lines.append(f"best: trial {best.number}, {search.cfg.monitor} {best.value:.6g}: {values}")
        if result := search.results.get(best.number):
            lines.append(f"best checkpoint: {short_path(result.best_checkpoint)}")
    tables.show(table, [*lines, f"table: {short_path(str(search.run_dir / 'search.csv'))}"])
