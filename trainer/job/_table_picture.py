"""Draw a table as a PNG image, with bars behind the numbers of one column."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FONT_SIZE, ROW, GAP, BAR = 15, 28, 24, 160
"""Pixels: font size, row height, space between columns, and length of the longest bar."""

INK, FAINT, BLUE = "#1f2328", "#d0d7de", "#9ec5fe"


def draw(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]], bar_column: int) -> None:
    """Draw a table, with bars for the numbers of one column; the largest number has the longest bar."""
    font = ImageFont.load_default(FONT_SIZE)
    lines = [list(columns), *map(list, rows)]
    widths = [max(font.getlength(line[i]) for line in lines) for i in range(len(columns))]
    widths[bar_column] = max(widths[bar_column], BAR)
    starts = [GAP + sum(widths[:i]) + i * GAP for i in range(len(columns))]
    image = Image.new("RGB", (round(starts[-1] + widths[-1] + GAP), ROW * (len(lines) + 1)), "white")
    pen = ImageDraw.Draw(image)
    largest = max((number(row[bar_column]) for row in rows), default=0.0)
    for n, line in enumerate(lines):
        top = ROW // 2 + n * ROW
        if n and (value := number(line[bar_column])):
            length = BAR * value / largest
            pen.rectangle((starts[bar_column], top + 4, starts[bar_column] + length, top + ROW - 4), fill=BLUE)
        for start, text in zip(starts, line, strict=True):
            pen.text((start, top + 6), text, fill=INK, font=font)
        pen.line((GAP, top + ROW, image.width - GAP, top + ROW), fill=INK if n == 0 else FAINT)
    image.save(path)


def number(text: str) -> float:
    """The number in a cell; 0 if it is empty."""
    return float(text) if text else 0.0
