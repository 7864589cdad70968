"""Print tables on the console, and the one of a finished run."""

import html
import math
from collections.abc import Collection, Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .result import DIVERGED, Result, short_path

NOT_THEIRS = ("balance/", "device/", "lr-", "speed/")
"""How the names of values begin that the module did not log."""


def summary_rows(result: Result) -> list[tuple[str, str]]:
    """List the rows of the summary table as (label, value); paths are below it."""
    untrained = result.mode != "fit" and result.started_from is None
    nan = ["the weights"] if result.status == DIVERGED else []
    nan += sorted(name for name, value in result.metrics.items() if math.isnan(value))
    processes = f", {result.num_processes} processes" if result.num_processes > 1 else ""
    rows = [
        ("strategy", result.strategy),
        ("devices", ", ".join(result.devices) + processes),
        ("global batch", "" if result.global_batch is None else f"{result.global_batch} samples"),
        ("shares", shares_text(result.metrics)),
        ("speed", "" if result.samples_per_s is None else f"{result.samples_per_s:,.0f} samples/s"),
        ("peak memory", memory_text(result.peak_memory_mib)),
        ("weights", "untrained: the module's own; resume=last takes trained ones" if untrained else ""),
        ("nan", ", ".join(nan)),
        *((name, value_text(name, result)) for name in sorted(result.metrics) if is_shown(name, result)),
    ]
    return [(label, value) for label, value in rows if value]


def value_text(name: str, result: Result) -> str:
    """A metric's final value; of the monitored one the best, such as `0.1234 in epoch 7 (last 0.1301)`."""
    last = f"{result.metrics[name]:.4f}"
    if name != result.monitor or result.monitored is None or result.monitored_epoch is None:
        return last
    return f"{result.monitored:.4f} in epoch {result.monitored_epoch}, the best (last {last})"


def as_html(result: Result) -> str:
    """The summary table and the paths as HTML, for notebooks."""
    paths = {"best checkpoint": short_path(result.best_checkpoint), "run directory": short_path(result.run_dir)}
    rows = [(label, value) for label, value in (*summary_rows(result), *paths.items()) if value]
    cells = "".join(f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>" for label, value in rows)
    return f"<table><caption>{result.mode} {result.status}</caption>{cells}</table>"


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
    """Whether to show a metric: not a step's value, nor what callbacks measured, nor an epoch's value twice."""
    repeated = name.endswith("_epoch") and name.removesuffix("_epoch") in result.metrics
    return not (name.endswith("_step") or name.startswith(NOT_THEIRS) or repeated)


def show_summary(result: Result, log_dir: str = "logs") -> None:
    """Print the summary table, the paths of the run, and the command that opens TensorBoard."""
    ended = "diverged: its weights contain nan" if result.status == DIVERGED else "finished"
    table = new_table(f"{result.mode} {ended}", ("what", "value"), text=("what",), folded=("value",))
    table.show_header = False
    for label, value in summary_rows(result):
        table.add_row(label, Text(value))
    named = {"started from": result.started_from, "best checkpoint": result.best_checkpoint}
    named |= {"predictions": result.predictions, "run directory": result.run_dir}
    paths = {label: short_path(path) for label, path in named.items() if path}
    width = max(map(len, paths))
    lines = [f"{label:<{width}}  {path}" for label, path in paths.items()]  # a path that is cut can't be pasted
    if any(Path(result.run_dir).glob("events.out.tfevents.*")):
        lines.append(f"tensorboard --logdir {log_dir}")
    show(table, lines, width=80)


def new_table(title: str, headings: Iterable[str], text: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """Make a table of numbers, aligned to the right; `text` to the left, `folded` also over several lines."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        left = heading in text or heading in folded
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=heading not in folded)
    return table


def show(table: Table | None, lines: Iterable[str] = (), width: int = 120) -> None:
    """Print a table, if there is one, and lines below it that are not wrapped.

    A table without folded columns is printed whole, however narrow the console is; one with them is `width` characters
    wide if the output is not a terminal.
    """
    console = Console()
    if table is not None:
        if all(column.no_wrap for column in table.columns):
            whole = console.measure(table, options=console.options.update(width=200)).maximum
            console.width = max(console.width, whole)
        elif not (console.is_terminal or console.is_jupyter):
            console.width = width
        console.print(table)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
