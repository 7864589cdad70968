"""Show a run's epochs: a line for each, which stays above the progress bar, and curves in the run directory."""

import importlib.util
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from typing_extensions import override

from ...strategies.core.patching import LIGHTNING_TELLS, filtered

log = logging.getLogger(__name__)


class EpochLines(pl.Callback):
    """Log a line after every epoch: its seconds, the steps so far, and the progress bar's metrics.

    Epochs count from 0, as in the progress bar, the names of checkpoints and the metric `epoch`.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._ended: tuple[int, float] | None = None
        self._told_first = ExitStack()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()  # of an epoch that was begun before the run was interrupted

        def tell_first(record: logging.LogRecord) -> bool:
            if "`Trainer.fit` stopped" in record.getMessage():  # what Lightning says before `on_train_end`
                self._tell(trainer)
                bar = trainer.progress_bar_callback
                if isinstance(bar, RichProgressBar) and bar.progress is not None:
                    bar.progress.stop()  # its last line stays above that
            return True

        self._told_first.enter_context(filtered(LIGHTNING_TELLS, tell_first))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._told_first.close()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell(trainer)
        self._since = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning computes the epoch's means after this hook
        self._ended = (trainer.current_epoch, time.perf_counter() - self._since)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell(trainer)

    def _tell(self, trainer: pl.Trainer) -> None:
        if self._ended is None:
            return
        epoch, seconds = self._ended
        self._ended = None
        metrics = trainer.progress_bar_metrics or {
            name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1
        }
        shown = [f"{name} {value:.4g}" for name, value in metrics.items()]
        of = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        log.info(" · ".join([f"epoch {epoch}{of}", f"step {trainer.global_step}", f"{seconds:.1f} s", *shown]))


class LogEveryEpoch(pl.Callback):
    """Shorten `log_every_n_steps` to the number of optimizer steps in an epoch, if an epoch has fewer.

    Lightning logs nothing if training is shorter than the interval, and the curves stay empty.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = trainer.num_training_batches
        if math.isfinite(batches) and batches > 0:
            steps = math.ceil(batches / trainer.accumulate_grad_batches)
            interval: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it undeclared
            setattr(trainer, "log_every_n_steps", min(interval, steps))  # noqa: B010


WIDTH, HEIGHT, MARGIN, LEGEND = 800, 300, 60, 200
"""Pixels: of one panel, its margin around the axes, and the space for names at its right."""

INK, FAINT = "#1f2328", "#d0d7de"
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bc4c00", "#0a7ea4", "#57606a")
NOT_THEIRS = ("balance/", "device/", "lr-", "speed/")
"""How the names of values begin that the module did not log."""

Curve = Sequence[tuple[float, float]]


class Curves(pl.Callback):
    """Keep the epochs' losses and metrics, and draw them when training ends: losses above, metrics below."""

    def __init__(self, run_dir: str) -> None:
        self.path = Path(run_dir) / "curves.png"
        self.curves: dict[str, list[tuple[float, float]]] = {}

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._keep(trainer)  # Lightning computes an epoch's means after its last hook

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._keep(trainer)
        losses = {name: curve for name, curve in self.curves.items() if curve and "loss" in name.lower()}
        others = {name: curve for name, curve in self.curves.items() if curve and name not in losses}
        if panels := [panel for panel in (losses, others) if panel]:
            draw(self.path, panels, {bounds(panels[0])[2]: f"step {bounds(panels[0])[2]}"})

    def _keep(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if step == 0 or not trainer.is_global_zero or trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        for name, value in trainer.callback_metrics.items():
            curve = self.curves.setdefault(name, [])
            repeated = name.endswith("_step") or name.startswith(NOT_THEIRS)
            if not repeated and value.numel() == 1 and (not curve or curve[-1][0] < step):
                curve.append((step, value.item()))


def draw(path: Path, panels: Sequence[Mapping[str, Curve]], ticks: Mapping[float, str]) -> None:
    """Draw curves, those of a panel on one axis; does nothing without Pillow, which TensorBoard installs.

    Args:
        panels: from top to bottom.
        ticks: what is written below the axes, by its place.
    """
    if importlib.util.find_spec("PIL") is None:
        return
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH + LEGEND, HEIGHT * len(panels)), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    for number, panel in enumerate(panels):
        top = number * HEIGHT
        low, high, last = bounds(panel)
        for value, y in ((high, top + MARGIN), (low, top + HEIGHT - MARGIN)):
            pen.line((MARGIN, y, WIDTH - MARGIN, y), fill=FAINT)
            pen.text((MARGIN - 6, y), f"{value:.3g}", fill=INK, font=font, anchor="rm")
        for at, text in ticks.items():
            pen.text((place((at, low), low, high, last, top)[0], top + HEIGHT - MARGIN + 8), text, INK, font, "ma")
        for i, (name, curve) in enumerate(sorted(panel.items())):
            colour = COLOURS[i % len(COLOURS)]
            points = [place(point, low, high, last, top) for point in curve if math.isfinite(point[1])]
            pen.line(points, colour, 2)
            for x, y in points[:1]:  # all there is after one epoch
                pen.ellipse((x - 3, y - 3, x + 3, y + 3), colour)
            pen.text((WIDTH - MARGIN + 12, top + MARGIN + 18 * i), name[:30], fill=colour, font=font)
    image.save(path)


def bounds(curves: Mapping[str, Curve]) -> tuple[float, float, float]:
    """The smallest and the largest finite value, and the last step."""
    values = [value for curve in curves.values() for _, value in curve if math.isfinite(value)] or [0.0]
    return min(values), max(values), max(step for curve in curves.values() for step, _ in curve)


def place(point: tuple[float, float], low: float, high: float, last: float, top: int) -> tuple[float, float]:
    """Where a point is, in pixels: step 0 at the left margin, the last at the right one."""
    step, value = point
    up = (value - low) / (high - low) if high > low else 0.5
    return MARGIN + step / last * (WIDTH - 2 * MARGIN), top + HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)
