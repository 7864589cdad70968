"""Whole runs: which micro-batches are at work at the same time, and for which reasons they run one after the other.

The last tests compare the order of the work on stage 0, which is F0 F1 B0 ... if micro-batches overlap, and F0 B0 F1 B1
... if they don't, however busy the machine is.
"""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.strategies import ModelParallelStrategy
from evener.strategies.pipeline.schedule import stage_order

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
        return self.layers(batch).mean()

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
    options = {"num_microbatches": NUM, "optimizer_copies": 0, **options}
    strategy = ModelParallelStrategy(**options)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader([torch.arange(float(NUM))] * 3, batch_size=None))
    first, *others = module.orders
    return [first[-2 * NUM :], *others]  # before the first step a few samples are looked at


def test_the_first_step_runs_in_order_and_the_others_overlap() -> None:
    assert fitted(Plain()) == [ONE_BY_ONE, OVERLAPPED, OVERLAPPED]


class Drawing(Plain):
    """Draws random numbers, once."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return nn.functional.dropout(self.layers(batch), 0.5).mean()


def test_random_numbers_alone_are_no_reason_to_run_in_order() -> None:
    assert fitted(Drawing()) == [ONE_BY_ONE, OVERLAPPED, OVERLAPPED]


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
        loss = self.layers[1](self.kept[-1]).mean()
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
    """Computes both layers, and dropout between them, once more in backward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        def scores(x: Tensor) -> Tensor:
            return self.layers[1](nn.functional.dropout(self.layers[0](x), 0.5))

        scored: Any = checkpoint(scores, batch, use_reentrant=False)
        return scored.mean()

    def tell(self, stage: int, microbatch: int, phase: str) -> None:
        seen = [task for task in self.orders[-1] if task[1:] == str(microbatch)]
        if [f"{phase}{microbatch}"] != seen[-1:]:  # else it is computed again
            super().tell(stage, microbatch, phase)


class ByHand(Plain):
    """Places its layers itself: there are no boundaries between stages."""

    def configure_model(self) -> None:
        self.layers.to("cpu")


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
def test_what_micro_batches_would_share_makes_them_run_in_order(module: type[Plain], options: dict[str, Any]) -> None:
    assert fitted(module(), **options) == [ONE_BY_ONE] * 3
