"""Print the summary table of a finished run."""

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..job.result import DIVERGED, Result, short_path


def summary_rows(result: Result) -> list[tuple[str, str]]:
    """List the rows of the summary table as (label, value).

    Args:
        result: the run's outcome.
    """
    processes = f", {result.num_processes} processes" if result.num_processes > 1 else ""
    rows = [
        ("strategy", result.strategy),
        ("devices", ", ".join(result.devices) + processes),
        ("global batch", "" if result.global_batch is None else f"{result.global_batch} samples"),
        ("shares", shares_text(result.metrics)),
        ("speed", "" if result.samples_per_s is None else f"{result.samples_per_s:,.0f} samples/s"),
        ("peak memory", memory_text(result.peak_memory_mib)),
        ("weights", weights_text(result)),
        ("best checkpoint", short_path(result.best_checkpoint)),
        ("nan", ", ".join(what_is_nan(result))),
        ("predictions", short_path(result.predictions)),
        *((name, f"{value:.4f}") for name, value in sorted(result.metrics.items()) if is_shown(name, result)),
        ("run directory", short_path(result.run_dir)),
    ]
    return [(label, value) for label, value in rows if value]


def weights_text(result: Result) -> str:
    """Which weights an evaluation is of; empty after training."""
    if result.mode == "fit":
        return ""
    return short_path(result.started_from) or "untrained: as the module makes them; resume=last takes trained ones"


def what_is_nan(result: Result) -> list[str]:
    """The weights, if they contain nan, and the names of metrics that are nan."""
    weights = ["the weights"] if result.status == DIVERGED else []
    return weights + sorted(name for name, value in result.metrics.items() if math.isnan(value))


def shares_text(metrics: dict[str, float]) -> str:
    """Final batch shares of a balanced strategy, such as `47%, 53%, efficiency 0.90`; empty for other strategies."""
    shares = [value for name, value in metrics.items() if name.startswith("balance/share_")]
    efficiency = metrics.get("balance/efficiency")
    shown = [f"{share:.0%}" for share in shares] + ([] if efficiency is None else [f"efficiency {efficiency:.2f}"])
    return ", ".join(shown) if shares else ""


def memory_text(peaks_mib: list[float]) -> str:
    """Peak memory per device, such as `812, 790 MiB`; a single number if all are equal."""
    shown = [f"{peak:,.0f}" for peak in peaks_mib]
    return f"{', '.join(shown[:1] if len(set(shown)) == 1 else shown)} MiB" if shown else ""


def is_shown(name: str, result: Result) -> bool:
    """Whether to show a metric: after `fit` training, test and monitored metrics; in other modes all of them."""
    own = name.startswith(("train", "test")) and not name.endswith("_step")
    return result.mode != "fit" or own or name == result.monitor


def show_summary(result: Result, log_dir: str = "logs") -> None:
    """Print the summary table and the command that opens TensorBoard."""
    rows = summary_rows(result)
    ended = "diverged: its weights contain nan" if result.status == DIVERGED else "finished"
    table = Table(title=f"{result.mode} {ended}", show_header=False, title_justify="left")
    for label, value in rows:
        table.add_row(label, Text(value, no_wrap=True))
    # wide enough for whole paths: a truncated path can't be pasted
    width = max(len(value) for _, value in rows) + max(len(label) for label, _ in rows) + 7
    console = Console(width=width)
    console.print(table)
    if any(Path(result.run_dir).glob("events.out.tfevents.*")):
        console.print(Text(f"tensorboard --logdir {log_dir}"), soft_wrap=True)
