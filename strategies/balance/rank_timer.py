"""Time one rank's own work in a step: forward and backward, without the wait for other ranks."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytorch_lightning as pl
import torch
from torch.utils.hooks import RemovableHandle

from ..core.devices import seconds_between, time_mark


@dataclass
class RankTimer:
    """Measures one step.

    The forward pass is timed inside DDP's wrapper; the backward pass until its last gradient is ready, before DDP waits
    for the gradients of other ranks.

    Args:
        device: its device; on an accelerator, device events measure the time.
    """

    module: pl.LightningModule
    device: torch.device
    _marks: list[float | torch.Event] = field(default_factory=list["float | torch.Event"], init=False)
    _last: float | torch.Event | None = field(default=None, init=False)
    _hooks: list[RemovableHandle] = field(default_factory=list[RemovableHandle], init=False)

    @contextmanager
    def forward(self) -> Generator[None]:
        """Measure the block, which runs the module's training step."""
        self._marks.append(self._now())
        yield
        self._marks.append(self._now())

    def begin_backward(self) -> None:
        """Measure from here until the last gradient is ready."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._note_ready) for parameter in parameters]
        self._marks.append(self._now())

    def finish_backward(self) -> None:
        """End the measurement."""
        for hook in self._hooks:
            hook.remove()
        self._marks.append(self._last if self._last is not None else self._now())

    def seconds(self) -> float:
        """Seconds of both passes; on an accelerator this waits until both have finished."""
        starts, ends = self._marks[0::2], self._marks[1::2]
        return sum(seconds_between(start, end) for start, end in zip(starts, ends, strict=True))

    def _now(self) -> float | torch.Event:
        return time_mark(self.device)

    def _note_ready(self, parameter: torch.Tensor) -> None:
        self._last = self._now()
