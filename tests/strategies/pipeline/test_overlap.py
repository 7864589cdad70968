"""Whole runs: which micro-batches are at work at the same time, and for which reasons they run one after the other.

The last tests compare the order of the work on stage 0, which is F0 F1 B0 ... if micro-batches overlap, and F0 B0 F1 B1
... if they don't, however busy the machine is.
"""

import threading
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.strategies import ModelParallelStrategy
from evener.strategies.pipeline.schedule import ScheduleName, stage_order

WAIT_S = 120.0
NUM = 4
ONE_BY_ONE = [f"{phase}{i}" for i in range(NUM) for phase in "FB"]
OVERLAPPED = [f"{task.phase}{task.microbatch}" for task in stage_order("1f1b", NUM, 2, 0)]


class Tell(torch.autograd.Function):
    """The identity, which tells forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Any) -> Tensor:
        ctx.tell = partial(tell, round(x[0].item()))
        ctx.tell("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.tell("B")
        return grads[0], None


class Telling(nn.Module):
    """A stage; micro-batches are one sample, which is the micro-batch's number."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.tell = [tell]

    def forward(self, x: Tensor) -> Tensor:
        return Tell.apply(x * self.scale, self.tell[0])


class Plain(pl.LightningModule):
    """Notes, by step, the order of the work on stage 0."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[list[str]] = []
        self.layers = nn.Sequential(*(Telling(partial(self.tell, stage)) for stage in range(2)))

    def tell(self, stage: int, microbatch: int, phase: str) -> None:
        if stage == 0:
            self.orders[-1].append(f"{phase}{microbatch}")

    def on_train_batch_start(self, *_: Any) -> None:
        self.orders.append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layers(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(module: Plain, **options: Any) -> list[list[str]]:
    """Three steps; the order of stage 0 in each."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"num_microbatches": NUM, "deterministic": False, "optimizer_copies": 0, **options}
    strategy = ModelParallelStrategy(**options)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader([torch.arange(float(NUM))] * 3, batch_size=None))
    return module.orders


class Meeting(Plain):
    """From the second step on, stage 1 does not end a micro-batch before stage 0 has begun the next one."""

    def __init__(self, schedule: ScheduleName) -> None:
        super().__init__()
        self.schedule = schedule
        self.began: dict[str, threading.Event] = {}
        self.num_met = 0

    def on_train_batch_start(self, *_: Any) -> None:
        super().on_train_batch_start()
        self.began.update({f"{phase}{i}": threading.Event() for i in range(NUM) for phase in "FB"})

    def tell(self, stage: int, microbatch: int, phase: str) -> None:
        super().tell(stage, microbatch, phase)
        if stage == 0:
            self.began[f"{phase}{microbatch}"].set()
            return
        if self.global_step == 0:
            return
        # forward, while stage 0 begins the next; backward, while it goes backward with the one before
        after = {("F", 0): "F1", ("B", 1): "B0"} if self.schedule == "1f1b" else {("F", 0): "F1", ("B", 0): "B1"}
        if awaited := after.get((phase, microbatch)):
            assert self.began[awaited].wait(WAIT_S), f"stage 0 never began {awaited}"
            self.num_met += 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_work_at_the_same_time_from_the_second_step_on(schedule: ScheduleName) -> None:
    module = Meeting(schedule)
    fitted(module, schedule=schedule, overlap="threads")
    assert module.num_met == 2 * 2  # steps, meetings


@pytest.mark.parametrize("overlap", ["threads", "launch"])
def test_the_first_step_runs_in_order_and_the_others_overlap(overlap: Any) -> None:
    assert fitted(Plain(), overlap=overlap) == [ONE_BY_ONE, OVERLAPPED, OVERLAPPED]


class Drawing(Plain):
    """Draws random numbers, once."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return nn.functional.dropout(self.layers(batch), 0.5).sum()


def test_random_numbers_alone_are_no_reason_to_run_in_order() -> None:
    assert fitted(Drawing(), overlap="threads") == [ONE_BY_ONE, OVERLAPPED, OVERLAPPED]


class Counting(Plain):
    """Counts its calls."""

    count = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx)


class Collecting(Plain):
    """Keeps what its first layer made in a list until the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.kept.append(self.layers[0](batch))
        loss = self.layers[1](self.kept[-1]).sum()
        self.kept.clear()
        return loss


class Hooking(Plain):
    """Registers a hook in each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        handle = self.layers[0].register_forward_hook(lambda *_: None)
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss


class Hooked(Plain):
    """Has a hook from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda *_: None)


class DrawingAgain(Plain):
    """Computes a layer with dropout once more in backward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x: Any = checkpoint(lambda x: nn.functional.dropout(x * 1.0, 0.5), self.layers[0](batch), use_reentrant=False)
        return self.layers[1](x + batch).sum()

    def tell(self, stage: int, microbatch: int, phase: str) -> None:
        if stage == 0:
            super().tell(stage, microbatch, phase)


class ByHand(Plain):
    """Places its layers itself: there are no boundaries between stages."""

    def configure_model(self) -> None:
        self.layers.to("cpu")


@pytest.mark.parametrize("overlap", ["threads", "launch"])
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Counting, {}),
        (Collecting, {}),
        (Hooking, {}),
        (Hooked, {}),
        (DrawingAgain, {}),
        (ByHand, {"partition": "manual"}),
    ],
)
def test_what_micro_batches_would_share_makes_them_run_in_order(
    module: type[Plain], options: dict[str, Any], overlap: Any
) -> None:
    assert fitted(module(), overlap=overlap, **options) == [ONE_BY_ONE] * 3
