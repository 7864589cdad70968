"""Print the table of `mode=compare`."""

from rich.table import Table
from rich.text import Text

from ..job import tables
from ..job.result import short_path
from .judge import Comparison
from .trial import OK, Trial

MIB = 2**20


def show_comparison(comparison: Comparison, run_dir: str) -> None:
    """Print the table, the strategies that did not train and why, and the recommendation.

    Args:
        run_dir: directory of the trials.
    """
    trained = [trial for trial in comparison.trials if trial.status == OK]
    lines = [
        *reasons(comparison),
        *comparison.doubts,
        *notes(comparison),
        recommendation(comparison),
        f"logs: {short_path(run_dir)}",
    ]
    tables.show(draw(comparison, trained) if trained else None, lines)


def draw(comparison: Comparison, trained: list[Trial]) -> Table:
    """Build the table, with one row per strategy that trained."""
    first = trained[0]
    title = f"compare: global batch {first.global_batch} samples, {len(first.losses)} steps"
    headings = ("strategy", "processes", "samples/s", f"× {first.strategy}", "peak MiB", "losses")
    table = tables.new_table(title, headings, text=("strategy", "losses"))
    for trial in trained:
        ratio = f"{trial.samples_per_s / first.samples_per_s:.2f}" if first.samples_per_s else ""
        name = Text(trial.strategy, style="bold" if trial.strategy == comparison.recommended else "")
        speed = f"{trial.samples_per_s:,.0f} ± {trial.spread:.0%}"
        table.add_row(name, str(trial.num_processes), speed, ratio, memory(trial), verdict(comparison, trial))
    return table


def memory(trial: Trial) -> str:
    """Peak memory per device (per process on the CPU): a list if there are few and they differ, otherwise the range."""
    sizes = [round(size / MIB) for size in trial.memory.values()]
    if len(set(sizes)) <= 1:
        return f"{sizes[0]:,}" if sizes else ""
    if len(sizes) <= 4:
        return " / ".join(f"{size:,}" for size in sizes)
    return f"{min(sizes):,} to {max(sizes):,}"


def verdict(comparison: Comparison, trial: Trial) -> str:
    """Whether a strategy's losses equal the reference's."""
    difference = comparison.differences[trial.strategy]
    if not trial.losses:
        return "not checked: training_step returns no loss"
    if trial.strategy == comparison.reference:
        return f"{trial.losses[0]:.4g} to {trial.losses[-1]:.4g}"
    if difference <= comparison.tolerance:
        return f"equal (to {difference:.0e})"
    return f"{'differ, see below' if comparison.excuses[trial.strategy] else 'DIFFER'} ({difference:.0e})"


def notes(comparison: Comparison) -> list[str]:
    """Explain differing losses."""
    found: list[str] = []
    for name, difference in comparison.differences.items():
        if difference <= comparison.tolerance:
            continue
        excuses = comparison.excuses[name]
        why = "; ".join(excuses) if excuses else "the cause is unknown, so it is not recommended; please report it"
        found.append(f"{name}: losses differ by {difference:.1e} (allowed: {comparison.tolerance:.0e}): {why}.")
    named = {excuse for excuses in comparison.excuses.values() for excuse in excuses}
    if named and not found:
        found.append(f"Losses agree here, but may differ in general: {'; '.join(sorted(named))}.")
    return found


def reasons(comparison: Comparison) -> list[str]:
    """Explain why strategies did not train."""
    return [f"{t.strategy} {t.status}: {t.reason}" for t in comparison.trials if t.status != OK]


def recommendation(comparison: Comparison) -> str:
    """Format the recommendation."""
    if comparison.recommended is None:
        return f"No recommendation: {comparison.reason}."
    return f"Recommended: strategy={comparison.recommended}, because {comparison.reason}."
