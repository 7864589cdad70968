"""Draw a table as plain text."""

from collections.abc import Sequence


def draw_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
