"""Micro-batches that go backward before the loss of the batch is known: what arrives.

What is kept meanwhile is measured in late_device/test_late_memory.py.
"""

import weakref
from functools import partial
from typing import Any, ClassVar

import pytest
from parity import Case, Net, SparseNet, assert_equal, baseline, fit, make_module, run
from stage_modules import DEEP, SquareNet
from torch import Tensor

from evener.strategies import ConfigError, DataParallelStrategy, ModelParallelStrategy


class Twice(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


def test_a_loss_goes_backward_once() -> None:
    with pytest.raises(RuntimeError, match="can go backward once only"):
        fit(Case(), Twice().double(), ModelParallelStrategy(num_microbatches=2))


class OldGradients(Net):
    """Notes, at each micro-batch of the second step, whether the last step's gradient is still in memory."""

    old: Any = None
    found: ClassVar[list[bool]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 0:
            type(self).old = weakref.ref(self.net[0].weight.grad)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1 and type(self).old is not None:
            type(self).found.append(type(self).old() is not None)
        return super().training_step(batch, batch_idx)


class ReadsOld(OldGradients):
    """Reads the last step's gradient before it is cleared."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.net[0].weight.grad is not None:
            self.losses.append(self.net[0].weight.grad.norm().item())


@pytest.mark.parametrize(
    ("module", "trainer", "expected"),
    [
        (OldGradients, {}, [True, True, False, False]),  # F0 F1 B0 F2 B1 F3
        (ReadsOld, {}, [True] * 4),
        (OldGradients, {"accumulate_grad_batches": 2}, [True] * 4 + [False] * 4),  # cleared after the first batch
    ],
)
def test_gradients_of_the_last_step_make_room_if_nobody_reads_them(
    module: type[OldGradients], trainer: dict[str, Any], expected: list[bool]
) -> None:
    case = Case(module, num=16, trainer={"max_epochs": 1, "limit_val_batches": 0, **trainer})
    module.found, module.old = [], None
    fit(case, make_module(case), ModelParallelStrategy(num_microbatches=4))
    assert module.found == expected


class Padding(Net):
    """Micro-batches of padding only: all weights are zero, and shares are equal."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "loss_weight": 0}


CASES = {
    "deep": DEEP,
    "tied": Case(SquareNet),
    "padding": Case(Padding, num=12, strategy={"verify": False}),
    "reads the last step's": Case(ReadsOld),
    "sparse": Case(SparseNet),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("name", "num", "stages", "output_device"),
    [
        *(("deep", 9, 2, "first"), ("tied", 2, 2, "first"), ("deep", 4, 1, "last"), ("deep", 4, 4, "last")),
        *((name, 2, 2, "last") for name in CASES),
    ],
)
def test_training_equals_one_devices(name: str, num: int, stages: int, output_device: Any, schedule: Any) -> None:
    given: Any = {"schedule": schedule, "output_device": output_device, **CASES[name].strategy}
    found = run(CASES[name], ModelParallelStrategy(num_microbatches=num, **given), devices=stages)
    assert_equal(found, baseline(CASES[name]), 1e-10)


class ReadingNet(Net):
    """Logs, in its step, the gradients of the last step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        gradient = self.net[0].weight.grad
        self.log("gradient", 0.0 if gradient is None else gradient.norm())
        return self.loss(batch)


@pytest.mark.parametrize(
    "strategy", [partial(ModelParallelStrategy, num_microbatches=2), DataParallelStrategy], ids=["stages", "replicas"]
)
def test_a_step_that_reads_gradients_gets_whole_batches(strategy: Any) -> None:
    # `.grad` held sums of other micro-batches; that of replicas was None
    case = Case(ReadingNet)
    assert_equal(run(case, strategy(), devices=2), baseline(case), 1e-10)
    with pytest.raises(ConfigError, match=r"reads the \.grad of a parameter"):
        run(case, strategy(global_view=False), devices=2)
