"""Print the table of `mode=plan`."""

import shlex
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ..job.summary import new_table, show
from ..study.trial import OK, Trial
from ._search import MemoryPlan
from .plan import GB

COLUMNS = ("parameters", "gradients", "optimizer", "batch", "activations", "communication", "peak")
CELLS = ("samples", *COLUMNS)
UNITS = (("GB", GB), ("MB", 10**6), ("kB", 10**3))


def show_plan(plan: MemoryPlan) -> None:
    """Print the memory of each device, and the largest batch that fits."""
    ranks = plan.global_batch // plan.loader_batch
    batch = f"{plan.global_batch}" if ranks == 1 else f"{plan.global_batch} = {ranks} ranks × {plan.loader_batch}"
    title = f"plan: strategy={plan.strategy}, global batch {batch} samples"
    table = new_table(title, ("device", *CELLS))
    for amounts, alike in groupby(plan.devices, key=lambda device: [getattr(device, column) for column in CELLS]):
        first, *others = (device.device for device in alike)
        name = f"{first} to {others[-1]}" if others else str(first)
        table.add_row(name, str(amounts[0]), *map(size_text, amounts[1:]))
    show(table, conclusions(plan))
    if plan.tried:
        show_tried(plan)


def show_tried(plan: MemoryPlan) -> None:
    """Print the other ways to train that were planned, and the command of the cheapest that fits."""
    headings = ("options", "loader's batch", "peak")
    table = new_table("the same global batch on the same devices, from cheap to expensive", headings, text=headings[:1])
    for tried in plan.tried:
        peak = "refused" if tried.peak is None else size_text(tried.peak)
        table.add_row(" ".join(tried.options), str(tried.loader_batch), peak)
    show(table, advice(plan, sys.argv))


REPLACED = ("mode=", "device_memory_gb=", "strategy=", "plan.")


def advice(plan: MemoryPlan, argv: Sequence[str]) -> list[str]:
    """Say what is the cheapest way that fits, with its command, made of this run's command line."""
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


def measured_lines(plan: MemoryPlan, measured: Trial) -> list[str]:
    """Describe a plan's error relative to the measured peaks: planned / measured - 1."""
    if measured.status != OK:
        return [f"The measurement {measured.status}: {measured.reason}"]
    sizes = [mib * 2**20 for mib in measured.peak_memory_mib]
    if len(sizes) != len(plan.devices) or not all(sizes):
        return [f"{len(plan.devices)} devices were planned, and {len(sizes)} measured; no error is shown."]
    return [
        f"device {device.device}: planned {size_text(device.peak)}, measured {size_text(size)} "
        f"(error {device.peak / size - 1:+.1%})"
        for device, size in zip(plan.devices, sizes, strict=True)
    ]


def size_text(size: float) -> str:
    """Format bytes with three digits and a unit: 1.23 GB is 1.23 * 10^9 bytes."""
    for unit, factor in UNITS:
        if size >= factor:
            digits = max(0, 2 - (len(str(int(size / factor))) - 1))
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size:.0f} B"
