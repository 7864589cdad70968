"""Draw the losses over learning rates as a PNG image."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, MARGIN = 800, 480, 64
"""Pixels; the margin is around the axes."""

INK, FAINT, PALE, BLUE, RED = "#1f2328", "#d0d7de", "#9ec5fe", "#0969da", "#cf222e"


def draw_curve(
    path: Path, rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], marked: float | None
) -> None:
    """Draw losses and their moving average over ascending rates on a logarithmic axis, with one rate marked."""
    finite = sorted(value for value in smoothed if math.isfinite(value)) or [0.0]
    low, high = finite[0], max(finite[-1], finite[0] + 1e-12)
    left, right = math.log10(rates[0]), max(math.log10(rates[-1]), math.log10(rates[0]) + 1e-12)

    def place(rate: float, loss: float) -> tuple[float, float]:
        x = MARGIN + (math.log10(rate) - left) / (right - left) * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (min(max(loss, low), high) - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        return x, y

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for exponent in range(math.ceil(left - 1e-9), math.floor(right + 1e-9) + 1):
        x = place(10.0**exponent, low)[0]
        pen.line((x, MARGIN, x, HEIGHT - MARGIN), fill=FAINT)
        pen.text((x, HEIGHT - MARGIN + 8), f"1e{exponent}", fill=INK, font=font, anchor="ma")
    for loss in (low, (low + high) / 2, high):
        y = place(rates[0], loss)[1]
        pen.line((MARGIN, y, WIDTH - MARGIN, y), fill=FAINT)
        pen.text((MARGIN - 8, y), f"{loss:.3g}", fill=INK, font=font, anchor="rm")
    for values, colour, width in ((losses, PALE, 1), (smoothed, BLUE, 3)):
        points = [place(r, v) for r, v in zip(rates, values, strict=True) if math.isfinite(v)]
        pen.line(points, fill=colour, width=width)
    pen.text((WIDTH / 2, HEIGHT - 16), "learning rate", fill=INK, font=font, anchor="mb")
    pen.text((MARGIN, MARGIN - 12), "loss (pale) and its moving average", fill=INK, font=font, anchor="lb")
    if marked is not None:
        x, y = place(marked, smoothed[rates.index(marked)])
        pen.ellipse((x - 6, y - 6, x + 6, y + 6), fill=RED)
        pen.text((x + 12, y), f"{marked:.3g}", fill=RED, font=font, anchor="lm")
    image.save(path)
