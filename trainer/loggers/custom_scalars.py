"""Lay out the CUSTOM SCALARS tab: the most important charts of a run on one page."""

import re
from collections.abc import Collection
from typing import Any, TypeAlias

Layout: TypeAlias = dict[str, dict[str, list[Any]]]
"""Category → chart → [`Multiline`, regular expressions of tags], the argument of `SummaryWriter.add_custom_scalars`."""

OUR_OWN = ("speed/", "device/", "balance/", "gradient/", "lr-")
"""Prefixes of tags that are not metrics of the module."""

STEP_TIME = ["speed/step_ms", "speed/compute_ms", "speed/data_wait_ms", "speed/communication_ms"]


def layout(monitor: str | None) -> Layout:
    """Arrange all charts that there can be; `with_data` selects those to show.

    Args:
        monitor: the metric that decides which checkpoint is best; it gets its own chart.

    Returns:
        The layout. The module's tags, which are not known in advance, are classified by name: those that contain
        `loss` are losses.
    """
    not_ours = f"(?i)(?!{'|'.join(OUR_OWN)}|epoch$)"
    metrics: dict[str, list[Any]] = {
        "loss": lines(not_ours + ".*loss"),
        "metrics": lines(not_ours + "(?!.*loss)"),
    }
    if monitor:
        metrics[f"monitored: {monitor}"] = lines(exactly(monitor))
    return {
        "Loss and metrics": metrics,
        "Speed": {
            "samples per second": lines(exactly("speed/samples_per_s")),
            "step time in ms": lines(*map(exactly, STEP_TIME)),
        },
        "Devices": {
            "share of the batch": lines(r"balance/share_\d+$"),
            "time in s": lines(r"balance/time_s_\d+$"),
            "peak memory in MiB": lines(r"device/peak_memory_mib_\d+$"),
            "balance efficiency": lines(exactly("balance/efficiency")),
        },
        "Optimizer": {
            "learning rate": lines(r"lr-"),
            "gradient norm": lines(r"gradient/norm"),
        },
    }


def with_data(charts: Layout, tags: Collection[str]) -> Layout:
    """Select the charts that have at least one line.

    Args:
        charts: categories of charts.
        tags: everything that is logged.

    Returns:
        The categories that have charts left.
    """
    chosen = {
        category: {
            title: chart for title, chart in of_category.items() if any(re.match(e, t) for e in chart[1] for t in tags)
        }
        for category, of_category in charts.items()
    }
    return {category: of_category for category, of_category in chosen.items() if of_category}


def lines(*expressions: str) -> list[Any]:
    """A chart with one line per tag that matches one of the regular expressions from its start."""
    return ["Multiline", list(expressions)]


def exactly(tag: str) -> str:
    """A regular expression that matches one tag exactly."""
    return f"{tag.replace('.', '[.]')}$"
