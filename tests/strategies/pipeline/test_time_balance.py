"""The cut that moves once to where stages take the same time; a clock that modules set stands for the host's."""

import logging
import os
import random
import warnings
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import CLASSES, FEATURES, Case, Net, assert_equal, baseline, fit, make_module, run
from torch import Tensor, nn

from evener.strategies import ConfigError, DDPModelParallelStrategy, ModelParallelStrategy
from evener.strategies.pipeline import _time_balance, stages
from evener.strategies.pipeline._plan import balanced_cut
from evener.strategies.pipeline._time_balance import PartTimes, TimeBalance
from evener.strategies.pipeline.options import StageOptions
from evener.strategies.pipeline.stages import Stages

CPU, META = torch.device("cpu"), torch.device("meta")
ByTime = partial(ModelParallelStrategy, balance="time", num_microbatches=2, deterministic=False, optimizer_copies=0)
CLOCK = [0.0]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK[0] = 0.0
    monkeypatch.setattr(_time_balance, "time_mark", lambda _: CLOCK[0])


class Late(torch.autograd.Function):
    """The identity, whose backward takes twice the time of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        CLOCK[0] += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        CLOCK[0] += 2 * ctx.seconds
        return grads[0], None


class Slow(nn.Module):
    """A layer that takes so many seconds forward."""

    def __init__(self, seconds: float, width: int = FEATURES) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(FEATURES, width)

    def forward(self, x: Tensor) -> Tensor:
        return Late.apply(torch.tanh(self.linear(x)), self.seconds)


class SlowNet(Net):
    """Six layers of equal size, of which the first three take three times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Slow(3.0) for _ in range(3)), *(Slow(1.0) for _ in range(2)), Slow(1.0, CLASSES))


def stages_of(module: Net, **options: Any) -> list[int]:
    """Train, and tell the stage of each part at the end."""
    found: list[list[int]] = []
    module.on_train_end = lambda: found.append(  # type: ignore[method-assign]
        list(module.trainer.strategy.layout.stages.plan.stage_of.values())  # type: ignore[attr-defined]
    )
    fit(Case(SlowNet, num=24), module, ByTime(**options))
    return found[0]


def test_the_cut_moves_to_where_stages_take_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = stages_of(make_module(Case(SlowNet)))
    assert found == [0, 0, 1, 1, 1, 1]  # forward 6 and 6 seconds, backward twice that
    told = [record.getMessage() for record in caplog.records if "balance=time" in record.getMessage()]
    assert [line.split(":\n")[0] for line in told] == [
        "balance=time: milliseconds of a micro-batch by stage, 27000.00 9000.00 as it was cut by memory, "
        "18000.00 18000.00 now"
    ]


def test_a_device_of_twice_the_speed_gets_twice_the_work() -> None:
    # measured on devices of speeds 1 and 2, each layer's work is 3 3 3 2 2 2: 3 | 12 / 2, and not 6 | 9 / 2
    assert stages_of(make_module(Case(SlowNet)), device_weights=[1, 2]) == [0, 0, 1, 1, 1, 1]
    assert stages_of(make_module(Case(SlowNet)), device_weights=[1, 5]) == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_training_equals_one_device_before_and_after(schedule: Any) -> None:
    case = Case(SlowNet, num=46, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
    assert_equal(run(case, ByTime(schedule=schedule), devices=2), baseline(case), 1e-10)


def test_parts_are_timed_forward_and_backward_the_first_one_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Slow(3.0), Slow(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return Late.apply(self.second(self.first(x)), 5.0)  # counts for the part before it

    module = Two()
    times = PartTimes(module, {"first": CPU, "second": CPU})
    for _ in range(2):
        times.begin_microbatch()
        module(torch.ones(2, FEATURES)).sum().backward()
        times.end_microbatch()
    module(torch.ones(2, FEATURES))  # validation
    times.close()
    assert times.seconds() == {"first": 9.0, "second": 18.0}
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_gradients_and_optimizer_state_move_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: dict[str, torch.device] = {}
    followed: list[Any] = []
    monkeypatch.setattr(stages, "place_parts", lambda module, device_of, elsewhere: moved.update(device_of))
    monkeypatch.setattr(_time_balance, "state_to_parameters", followed.append)
    module: Any = make_module(Case(SlowNet))
    layout = Stages([CPU, META], StageOptions(balance="time", num_microbatches=2, optimizer_copies=0))
    layout.place(module)
    assert [device.type for device in moved.values()] == ["cpu"] * 3 + ["meta"] * 3
    trainer: Any = type("Optimized", (), {"optimizers": ["first", "second"]})()
    module._trainer = trainer
    TimeBalance(module, layout)._move({f"net.{i}": 3.0 if i < 3 else 1.0 for i in range(6)})
    assert [device.type for device in moved.values()] == ["cpu"] * 2 + ["meta"] * 4
    assert followed == ["first", "second"]  # see test_stage_layout.py for what becomes of their state


def test_a_device_for_which_parameters_are_made_anew_is_refused() -> None:
    module: Any = make_module(Case(SlowNet))
    layout = Stages([CPU, META], StageOptions(balance="time", num_microbatches=2, optimizer_copies=0))
    layout.place(module)
    with pytest.raises(ConfigError, match="optimizers would go on with the old ones"):
        TimeBalance(module, layout)._move({f"net.{i}": 3.0 if i < 3 else 1.0 for i in range(6)})


def test_weighted_cuts_equal_brute_force() -> None:
    assert balanced_cut([3, 3, 3, 1, 1, 1], [1, 1]) == [2, 4]
    assert balanced_cut([3, 3, 3, 1, 1, 1], [1, 2]) == [1, 5]  # 3 and 9 / 2
    assert balanced_cut([1, 1, 1, 1, 1, 1], [1, 2, 3]) == [1, 2, 3]
    generator = random.Random(0)
    for _ in range(200):
        costs = [generator.randint(1, 9) for _ in range(generator.randint(3, 9))]
        weights = [generator.choice([0.5, 1, 2, 3]) for _ in range(generator.randint(1, 3))]
        cuts = combinations(range(1, len(costs)), len(weights) - 1)
        edges = [[*pairwise([0, *cut, len(costs)])] for cut in cuts]
        best = min(max(sum(costs[a:b]) / w for (a, b), w in zip(edge, weights, strict=True)) for edge in edges)
        sizes = iter(balanced_cut(costs, weights))
        found, start = 0.0, 0
        for weight, size in zip(weights, sizes, strict=True):
            found = max(found, sum(costs[start : start + size]) / weight)
            start += size
        assert found == pytest.approx(best)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "flops"}, "balance=flops is not allowed. Give memory or time"),
        ({"balance": "time"}, "balance=time with num_microbatches=1"),
        ({"balance": "time", "num_microbatches": 2, "deterministic": True}, "Set num_microbatches=2 or more and"),
        ({"balance": "time", "num_microbatches": 2, "partition": ["net.1"]}, "says where the module is cut"),
        ({"device_weights": [1, 0]}, r"device_weights=\[1,0\] is not allowed. Give a list of numbers > 0"),
        ({"device_weights": [1, 1, 2]}, r"device_weights has 3 entries for 2 stages \(device_weights=\[1, 1, 2\]\)"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(Case(), make_module(Case()), ModelParallelStrategy(**options))


def _train_by_time() -> tuple[list[int], int, Tensor]:
    """A rank's stages at the end, the number of times that its module was wrapped, and the weights."""
    warnings.simplefilter("ignore")  # Lightning's advice
    _time_balance.time_mark = lambda _: CLOCK[0]
    wrapped: list[int] = []

    class Counted(DDPModelParallelStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            wrapped.append(1)

    case, module = Case(SlowNet, num=48), make_module(Case(SlowNet))
    if os.environ["RANK"] == "1":  # where the other rank has 3 3 3 1 1 1, which it would cut into 6 and 6 alone
        for layer, seconds in zip(module.net, (9.0, 1.0, 1.0, 1.0, 1.0, 1.0), strict=True):
            layer.seconds = seconds
    found: list[list[int]] = []
    module.on_train_end = lambda: found.append(  # type: ignore[method-assign]
        list(module.trainer.strategy.layout.stages.plan.stage_of.values())  # type: ignore[attr-defined]
    )
    options: Any = {"balance": "time", "num_microbatches": 2, "deterministic": False, "optimizer_copies": 0}
    strategy = Counted(batch_size_is="global", timeout_s=60, **options)
    fit(case, module, strategy, devices=4)
    return found[0], len(wrapped), torch.cat([p.detach().flatten() for p in module.parameters()])


def test_ranks_cut_alike_by_their_average_times_and_train_as_one_device() -> None:
    module = make_module(Case(SlowNet))
    fit(Case(SlowNet, num=48), module, "single_device", devices=1)
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    for stages_found, num_wrapped, weights in run_ranks(_train_by_time, 2, timeout_s=100):
        assert stages_found == [0, 1, 1, 1, 1, 1]  # of 6 2 2 1 1 1 on the average: 6 and 7
        assert num_wrapped == 2
        assert (weights - expected).abs().max() <= 1e-10
