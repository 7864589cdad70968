"""Print tables on the console."""

from collections.abc import Collection, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text


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
