"""Print the table of `mode=plan`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..compare.trial import OK, Trial
from ._search import DevicePlan, MemoryPlan
from .plan import GB, plan_errors

COLUMNS = ("parameters", "gradients", "optimizer", "batch", "activations", "communication", "peak")
UNITS = (("GB", GB), ("MB", 10**6), ("kB", 10**3))


def show_plan(plan: MemoryPlan) -> None:
    """Print the memory of each device, and the largest batch that fits."""
    table = Table(title=title(plan), title_justify="left")
    for heading in ("device", "samples", *COLUMNS):
        table.add_column(heading, no_wrap=True, justify="right")
    for first, last in alike(plan.devices):
        name = str(first.device) if first is last else f"{first.device} to {last.device}"
        table.add_row(name, str(first.samples), *(size_text(getattr(first, column)) for column in COLUMNS))
    console = Console()
    width = console.measure(table, options=console.options.update(width=200)).maximum
    Console(width=max(console.width, width)).print(table)
    for line in conclusions(plan):
        console.print(Text(line), soft_wrap=True)
    if plan.tried:
        show_tried(plan, console)


def show_tried(plan: MemoryPlan, console: Console) -> None:
    """Print the other ways to train that were planned, and the command of the cheapest that fits."""
    table = Table(title="the same global batch on the same devices, from cheap to expensive", title_justify="left")
    for heading in ("options", "loader's batch", "computing", "sent", "peak"):
        table.add_column(heading, overflow="fold", justify="left" if heading == "options" else "right")
    for tried in plan.tried:
        peak = "refused" if tried.peak is None else size_text(tried.peak)
        cells = (str(tried.loader_batch), f"{tried.computing:.2f}", f"{tried.traffic:.1f} P", peak)
        table.add_row(" ".join(tried.options), *cells)
    width = console.measure(table, options=console.options.update(width=200)).maximum
    Console(width=max(console.width, width)).print(table)
    for line in advice(plan, sys.argv):
        console.print(Text(line), soft_wrap=True)


REPLACED = ("mode=", "device_memory_gb=", "strategy=", "plan.")


def advice(plan: MemoryPlan, argv: Sequence[str]) -> list[str]:
    """Say what is the cheapest way that fits, with its command.

    Args:
        argv: the command line of this run.
    """
    found = plan.cheapest
    if found is None:
        return ["None of these fits. Use more devices, a smaller batch, or a lower precision."]
    given = [argument for argument in argv[1:] if not argument.startswith(REPLACED)]
    if any(option.startswith("strategy=") for option in found.options):
        given = [argument for argument in given if not argument.startswith("strategy.")]
    else:
        own = [argument for argument in argv[1:] if argument.startswith("strategy=")]
        names = tuple(f"{option.partition('=')[0]}=" for option in found.options)
        given = [*own, *(argument for argument in given if not argument.startswith(names))]
    start = ["python", Path(argv[0]).name] if argv[0].endswith(".py") else [Path(argv[0]).name]
    lines = ["The cheapest that fits:", f"  {shlex.join([*start, *given, *found.options])}"]
    if found.loader_batch != plan.loader_batch:
        lines.append(f"Set the loader's batch to {found.loader_batch} samples for the same global batch.")
    return lines


def title(plan: MemoryPlan) -> str:
    """The title of the table."""
    ranks = plan.global_batch // plan.loader_batch
    batch = f"{plan.global_batch}" if ranks == 1 else f"{plan.global_batch} = {ranks} ranks × {plan.loader_batch}"
    return f"plan: strategy={plan.strategy}, global batch {batch} samples"


def alike(devices: list[DevicePlan]) -> list[tuple[DevicePlan, DevicePlan]]:
    """Group adjacent devices with equal memory, as (first, last)."""
    groups: list[tuple[DevicePlan, DevicePlan]] = []
    for device in devices:
        if groups and amounts(groups[-1][0]) == amounts(device):
            groups[-1] = (groups[-1][0], device)
        else:
            groups.append((device, device))
    return groups


def amounts(device: DevicePlan) -> tuple[int, ...]:
    """The cells of a row without the device's index."""
    return (device.samples, *(int(getattr(device, column)) for column in COLUMNS))


def conclusions(plan: MemoryPlan) -> list[str]:
    """Say whether the plan fits, and the largest batch that does."""
    if plan.device_bytes is None:
        return ["Set device_memory_gb to find the largest batch that fits."]
    room = size_text(plan.device_bytes)
    fits = "fits" if plan.peak <= plan.device_bytes else "does not fit"
    line = f"This {fits} {room}: the largest peak of a device is {size_text(plan.peak)}."
    if plan.largest_batch is None:
        return [line, f"Any batch fits {room}."]
    if not plan.largest_batch:
        return [line, f"A batch of one sample does not fit {room}: the module is too large for this strategy."]
    return [line, f"The largest batch of the loader that fits {room}: {plan.largest_batch:,} samples."]


def show_measured(plan: MemoryPlan, measured: Trial) -> None:
    """Print a plan's error relative to the measured peaks."""
    console = Console()
    for line in measured_lines(plan, measured):
        console.print(Text(line), soft_wrap=True)


def measured_lines(plan: MemoryPlan, measured: Trial) -> list[str]:
    """Describe a plan's error relative to the measured peaks."""
    if measured.status != OK:
        return [f"The measurement {measured.status}: {measured.reason}"]
    errors = plan_errors(plan, measured)
    if errors is None:
        return [f"The measured devices ({', '.join(measured.memory)}) differ from the planned ones; no error is shown."]
    pairs = zip(measured.memory.items(), plan.devices, errors, strict=True)
    return [
        f"{name}: planned {size_text(device.peak)}, measured {size_text(size)} (error {error:+.1%})"
        for (name, size), device, error in pairs
    ]


def size_text(size: float) -> str:
    """Format bytes with three digits and a unit: 1.23 GB is 1.23 * 10^9 bytes."""
    for unit, factor in UNITS:
        if size >= factor:
            digits = max(0, 2 - (len(str(int(size / factor))) - 1))
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size:.0f} B"
