"""Define what a layout is: how one process uses its devices. Strategies, loops and callbacks know nothing else of them.

layout          one process holds                    where
SingleLayout    the module on one device             here
ReplicaLayout   a copy per device, the batch is cut  strategies/replicas/layout.py
StageLayout     one copy, cut across its devices     strategies/pipeline/layout.py
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from .exact.loss_reader import LossReader
from .losses import losses_in
from .run_structures import RunStructures
from .whole.over_batch import end_of_step
from .whole.whole_steps import WholeSteps


class Layout(Protocol):
    """Places a module on the devices of a process and runs its steps there; what a layout has no need of does nothing.

    Attributes:
        devices: the devices of the process, the root device first.
        losses: what the last training step logged, or returned, as its loss.
        whole: the steps that get whole batches.
        reader: reads what the losses of the parts of a batch divide by.
    """

    devices: list[torch.device]
    losses: list[Tensor]
    whole = WholeSteps()
    reader: LossReader = LossReader("")

    @property
    def meeting_device(self) -> torch.device:
        """The device that batches are moved to."""
        return self.devices[0]

    @property
    def cut_by(self) -> str:
        """The option that cuts a process's batch into parts, as `name=value`; empty if a step sees it whole."""
        return ""

    @property
    def cuts_steps(self) -> bool:
        """Whether the module's training steps see parts of a batch."""
        return bool(self.cut_by)

    def cuts_evaluation(self, step: str) -> bool:
        """Whether batches of a step of evaluation are cut as those of training."""
        return False

    def verify(self, trainer: pl.Trainer) -> None:
        """Refuse, before anything is placed, a module or options that can't be honoured."""

    def verify_optimizer_step(self) -> None:
        """Refuse an optimizer step that a training step makes itself, where a part of the batch would make it."""

    def creating(self) -> AbstractContextManager[Any]:
        """Create a module inside the block, on a device that has room for it."""
        return nullcontext()

    def place(self, module: pl.LightningModule) -> None:
        """Move the module to its devices."""
        module.to(self.devices[0])

    def begin(self, trainer: pl.Trainer, structures: RunStructures) -> None:
        """Begin a run with the placed module; `structures` tells how its batches are cut."""

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module (`training_step`, ...) on a batch.

        Returns:
            What the module would return for the whole batch on one device, the loss on the root device.
        """
        ...

    def weights_changed(self) -> None:
        """Learn that somebody may have written to parameters."""

    def finish_step(self) -> bool:
        """Learn that the optimizer has stepped.

        Returns:
            Whether parameters have moved to other devices.
        """
        return False

    def describe(self, module: nn.Module) -> str:
        """Draw what each device holds, as text; empty if there is nothing to draw."""
        return ""

    def close(self) -> None:
        """End the run: stop threads, remove hooks. The module keeps its state."""


def evaluation_step(stage: str) -> Any:
    """Make the method of a strategy that runs a step of evaluation: `val`, `test` or `predict`."""
    step, context = f"{'validation' if stage == 'val' else stage}_step", f"{stage}_step_context"

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.contract.evaluate(step, getattr(self.precision_plugin, context), *args, **kwargs)

    return run


def drop_layout(strategy: Any, unless_on: Sequence[torch.device] = ()) -> None:
    """Have a strategy make its layout, a cached property, anew.

    Args:
        unless_on: the devices of a layout that may stay.
    """
    made: Layout | None = vars(strategy).get("layout")
    if made is not None and made.devices != list(unless_on):
        del strategy.layout


class SingleLayout(Layout):
    """The module on one device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.losses = []
        self._module: pl.LightningModule | None = None
        self._end: Callable[[Any], Any] | None = None

    @override
    def begin(self, trainer: pl.Trainer, structures: RunStructures) -> None:
        self._module = trainer.lightning_module
        self._end = end_of_step(self._module)

    @override
    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        output = getattr(self._module, name)(*args, **kwargs)
        if self._end is not None and name == "training_step":
            output = self._end(output)
        self.losses = losses_in(output) if isinstance(output, dict) else []  # which has a `loss_weight`, or none counts
        return output
