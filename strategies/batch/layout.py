"""Define what a layout is: how one process uses its devices. Strategies, loops and callbacks know nothing else of them.

layout          one process holds                    parts of a batch                    where
Layout          the module on one device             none                                here
ReplicaLayout   a copy per device, the batch is cut  replicas, each on its device        strategies/replicas/layout.py
StageLayout     one copy, cut across its devices     micro-batches, one after the other  strategies/pipeline/layout.py
"""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import WarningCache
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from ..core.errors import PartsDiffer
from ..core.module_checks import has_batchnorm
from ..core.types import Batch, Chunk
from .exact.loss_reader import LossReader
from .log_recorder import LogRecorder
from .policies import Policy, without_single_samples
from .results import losses_in
from .run_structures import RunStructures

OrWhole: TypeAlias = Literal["auto", False]
"""Whether steps may get whole batches: where a module trains otherwise in parts of them, or these can't be cut."""


GlobalView: TypeAlias = bool | Literal["auto"]
"""The same, or whether they always get them."""


STEPS = frozenset(("training_step", "validation_step", "test_step", "predict_step"))


@dataclass
class WholeSteps:
    """The steps of a run that get whole batches.

    Args:
        strategy: name that begins messages.
        how: how a step computes a whole batch, for the log.
        allowed: whether steps may get them.
    """

    strategy: str = ""
    how: str = ""
    allowed: bool = False
    names: set[str] = field(default_factory=set[str])

    def take(self, step: str, why: PartsDiffer) -> None:
        """Give a step whole batches, or refuse that."""
        if not self.allowed or step in self.names:
            raise why
        self.names |= STEPS if step == "training_step" else {step}  # its evaluation computes the same loss
        tell_whole(self.strategy, why, f"{step} gets whole batches (strategy.global_view), {self.how}")

    def go_on(self, names: Collection[str]) -> None:
        """Give steps whole batches that got them in the run that is resumed."""
        if self.allowed and not self.names.issuperset(names):
            self.names.update(names)
            rank_zero_info(f"{self.strategy}: {', '.join(sorted(names))} get whole batches, as before, {self.how}.")

    @contextmanager
    def where_needed(self, step: str) -> Generator[None]:
        """Give a step whole batches from now on if what is tried inside the block needs them."""
        try:
            yield
        except PartsDiffer as exc:
            self.take(step, exc)

    def run(self, step: str, call: Callable[[], Any]) -> Any:
        """Run a step, which is known to need whole batches before anything of it counts; then it runs again."""
        with self.where_needed(step):
            return call()
        return call()


def tell_whole(strategy: str, why: PartsDiffer, what: str) -> None:
    """Say in one line why steps get whole batches, and what that means."""
    reason = str(why).partition(". ")[0].removesuffix(".")
    named = reason if reason.startswith(f"{strategy}: ") else f"{strategy}: {reason}"
    faster = "; evener.over_batch(fn) is faster" if "evener.over_batch(fn)" in str(why) else ""
    rank_zero_info(f"{named}. So {what}{faster}.")


Attach: TypeAlias = Callable[[Tensor], Tensor]


class Layout:
    """Places a module on the devices of a process and runs its steps there; what a layout has no need of does nothing.

    `devices` begin with the root device. `losses` are what the last training step logged, or returned, as its loss.
    """

    whole = WholeSteps()

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.losses: list[Tensor] = []
        self.reader = LossReader("")  # until the strategy gives its own
        self._module: pl.LightningModule | None = None

    @property
    def meeting_device(self) -> torch.device:
        """The device that batches are moved to."""
        return self.devices[0]

    @property
    def cut_by(self) -> str:
        """The option that cuts batches of training into parts, as `name=value`; empty if a step sees them whole."""
        return ""

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
        self._module = trainer.lightning_module

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module; returns what it would for the whole batch on one device, the loss on the root."""
        output = getattr(self._module, name)(*args, **kwargs)
        self.losses = losses_in(output) if isinstance(output, dict) else []  # which has a `loss_weight`, or none counts
        return output

    def weights_changed(self) -> None:
        """Learn that somebody may have written to parameters."""

    def finish_step(self) -> bool:
        """Learn that the optimizer has stepped; returns whether parameters have moved to other devices."""
        return False

    def close(self) -> None:
        """End the run: stop threads, remove hooks. The module keeps its state."""


def drop_layout(strategy: Any, unless_on: Sequence[torch.device] = ()) -> None:
    """Have a strategy make its layout, a cached property, anew, unless it is on these devices."""
    made: Layout | None = vars(strategy).get("layout")
    if made is not None and made.devices != list(unless_on):
        del strategy.layout


class PartsLayout(Layout):
    """A layout that cuts each batch into `num_parts`; `policy` computes the samples of each."""

    strategy: str
    policy: Policy
    num_parts: int

    def __post_init__(self) -> None:
        super().__init__(self.devices)
        self.structures = RunStructures()
        self._has_batchnorm = False
        self._told = WarningCache()

    @property
    def module(self) -> pl.LightningModule:
        """The module of the run."""
        assert self._module is not None, "the run has not begun"
        return self._module

    @property
    def logs(self) -> LogRecorder:
        """Records what the parts log."""
        raise NotImplementedError

    @override
    def begin(self, trainer: pl.Trainer, structures: RunStructures) -> None:
        super().begin(trainer, structures)
        self.structures, self._has_batchnorm = structures, has_batchnorm(trainer.lightning_module)

    def train_parts(self, batch: Batch, *rest: Any) -> Any:
        """Run a training step in parts of a batch; returns what the step would of the whole one."""
        chunks, sizes = self.cut(batch)
        outputs, attach = self.run_parts(chunks, sizes, rest)
        result = self.logs.combine(outputs, sizes, self.structures.of_results("training_step"))
        self.losses = self.logs.losses
        if isinstance(result, dict):
            return {**result, "loss": attach(result["loss"])}
        return None if result is None else attach(result)

    def run_parts(self, chunks: Sequence[Chunk], sizes: Sequence[int], rest: Sequence[Any]) -> tuple[list[Any], Attach]:
        """Run the training step on each part with samples; returns outputs, and what leads the loss back to them."""
        raise NotImplementedError

    def cut(self, batch: Batch, loader: int = 0) -> tuple[list[Chunk], list[int]]:
        """The parts of a batch of a loader, and their samples; raises PartsDiffer if it can't be cut."""
        structure = self.structures.of_batch(self.module.trainer, loader)
        num = structure.num_samples(batch)
        if not num:
            raise PartsDiffer(
                f"{self.strategy}: a batch of type {type(batch).__name__} has no samples to split: it holds no tensor "
                "with rows and no list. Give tensors of shape (samples, ...), or define __len__ and split(sizes)."
            )
        sizes = self.sizes(num)
        return structure.split(batch, sizes), sizes

    def sizes(self, num: int) -> list[int]:
        """The samples of each part of `num`."""
        sizes = self.policy.sizes(num, self.num_parts)
        if not (self._has_batchnorm and self.module.training and 1 in sizes):
            return sizes
        self.tell("BatchNorm can't normalise a single sample in training, so chunks of one are merged into others.")
        return without_single_samples(sizes)

    def tell(self, message: str) -> None:
        """Say something once."""
        self._told.info(f"{self.strategy}: {message}")
