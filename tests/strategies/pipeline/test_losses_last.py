"""Micro-batches that meet on the first stage's device compute their losses last; a fake makes CPUs count as GPUs."""

from functools import partial
from typing import Any

import pytest
import torch
from parity import CLASSES, FEATURES, Case, Net, TokenNet, assert_equal, baseline, fit, make_module, run
from stage_modules import DEEP, SquareNet
from torch import Tensor, nn

from evener.strategies import ModelParallelStrategy
from evener.strategies.core.executor import Executor, Piece
from evener.strategies.pipeline import _microbatches, stages
from evener.strategies.pipeline._losses_last import LossesLast

First = partial(ModelParallelStrategy, output_device="first", deterministic=False)


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device counts as one on which work is only queued."""
    monkeypatch.setattr(_microbatches, "is_accelerator", lambda _: True)


def test_losses_follow_all_forward_passes_in_order() -> None:
    seen: list[str] = []
    order = LossesLast(3)

    def step(i: int) -> int:
        seen.append(f"forward {i}")
        order.pause(i)
        seen.append(f"loss {i}")
        order.pause(i)  # the last part is called again
        return i

    pieces = [Piece(torch.device("cpu"), str(i), partial(order.run, i, partial(step, i))) for i in range(3)]
    assert Executor(threads=True).run(pieces) == [0, 1, 2]
    assert seen == ["forward 0", "forward 1", "forward 2", "loss 0", "loss 1", "loss 2"]


def test_a_micro_batch_that_fails_or_never_meets_holds_up_no_other() -> None:
    seen: list[str] = []
    order = LossesLast(3)

    def step(i: int) -> None:
        if i == 0:
            raise ValueError("no such row")
        if i == 2:
            order.pause(i)
        seen.append(f"loss {i}")

    pieces = [Piece(torch.device("cpu"), f"micro-batch {i}", partial(order.run, i, partial(step, i))) for i in range(3)]
    with pytest.raises(ValueError, match=r"no such row .*micro-batch 0"):
        Executor(threads=True).run(pieces)
    assert seen == ["loss 1", "loss 2"]


@pytest.mark.usefixtures("launching")
@pytest.mark.filterwarnings("ignore:A stage is used before")
@pytest.mark.parametrize("case", [DEEP, Case(TokenNet, num=22), Case(SquareNet)], ids=["deep", "tokens", "tied"])
@pytest.mark.parametrize("num", [2, 9])
def test_training_equals_one_devices(case: Case, num: int) -> None:
    assert_equal(run(case, First(num_microbatches=num), devices=2), baseline(case), 1e-10)


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize(("output_device", "expected"), [("first", "0 1 0 1 0 1 L L L"), ("last", "0 1 L 0 1 L 0 1 L")])
def test_stages_are_launched_before_losses_only_where_they_meet_on_the_first(output_device: Any, expected: str) -> None:
    seen: list[str] = []

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append("0" if self.in_features == FEATURES else "1")
            return super().forward(x)

    class Seen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Noted(FEATURES, 8), nn.Tanh(), Noted(8, CLASSES))

        def loss(self, batch: Any) -> Tensor:
            x, y = self.read(batch)
            out = self(x)
            seen.append("L")
            return torch.nn.functional.cross_entropy(out, y)

        def on_train_batch_start(self, *_: Any) -> None:
            seen.clear()

        def on_train_batch_end(self, *_: Any) -> None:
            steps.append(" ".join(seen))

    steps: list[str] = []
    case = Case(Seen, num=24, batch_size=6)
    module: Any = make_module(case)
    strategy = ModelParallelStrategy(num_microbatches=3, output_device=output_device, deterministic=False)
    module.on_after_backward = lambda: None

    fit(case, module, strategy, max_epochs=1, limit_val_batches=0)
    assert steps[1:] == [expected] * 3  # the first step is watched, and its micro-batches run in order


def test_tensors_of_the_batch_are_known_until_they_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only they may be moved without waiting for what is queued on their device."""
    monkeypatch.setattr(stages, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(stages, "work_so_far", lambda device: "event")
    x, other = torch.ones(4, 2), torch.ones(4, 2)
    batch = stages.BatchTensors({"x": x, "name": "a"})
    assert batch.ready == "event"  # type: ignore[comparison-overlap]
    assert batch.holds(x)
    assert batch.holds(x[1:3].flatten())
    assert not batch.holds(other)
    assert not batch.holds(x * 2)
    assert not batch.holds((x * 2).requires_grad_())
    x[0] = 5
    assert not batch.holds(x)
    assert not stages.BatchTensors(None).holds(x)
