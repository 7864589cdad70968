"""The closing table of a run."""

from rich.console import Console
from rich.table import Table

from .result import Result


def summary_rows(result: Result) -> list[tuple[str, str]]:
    """List what the closing table says, as (label, value).

    Args:
        result: the run's outcome.
    """
    processes = f", {result.num_processes} processes" if result.num_processes > 1 else ""
    rows = [
        ("strategy", result.strategy),
        ("devices", ", ".join(result.devices) + processes),
        ("global batch", "" if result.global_batch is None else f"{result.global_batch} samples"),
        ("speed", "" if result.samples_per_s is None else f"{result.samples_per_s:,.0f} samples/s"),
        ("best checkpoint", result.best_checkpoint or ""),
        ("predictions", result.predictions or ""),
        *((name, f"{value:.4f}") for name, value in sorted(result.metrics.items()) if is_shown(name, result)),
        ("run directory", result.run_dir),
    ]
    return [(label, value) for label, value in rows if value]


def is_shown(name: str, result: Result) -> bool:
    """Test metrics and the monitored metric after `fit`; every metric of the other modes."""
    return result.mode != "fit" or name.startswith("test") or name == result.monitor


def show_summary(result: Result, log_dir: str = "logs") -> None:
    """Print the closing table, and the line that opens TensorBoard."""
    table = Table(title=f"{result.mode} finished", show_header=False, title_justify="left")
    for label, value in summary_rows(result):
        table.add_row(label, value, end_section=False)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"tensorboard --logdir {log_dir}", highlight=False, markup=False)
