"""The cut that moves once to where stages take the same time; a clock that modules set stands for the host's."""

import logging
import os
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import CLASSES, FEATURES, Case, Net, assert_equal, baseline, fit, make_module, run
from torch import Tensor, nn

from evener.strategies import ConfigError, DDPModelParallelStrategy, ModelParallelStrategy
from evener.strategies.pipeline import layout as time_balance
from evener.strategies.pipeline.layout import TimeBalance
from evener.strategies.pipeline.stages import StageOptions, Stages

BY_TIME: dict[str, Any] = {"balance": "time", "num_microbatches": 2, "deterministic": False, "optimizer_copies": 0}
CLOCK = [0.0]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK[0] = 0.0
    monkeypatch.setattr(time_balance, "time_mark", lambda _: CLOCK[0])


class Slow(nn.Module):
    """A layer that takes so many seconds forward."""

    def __init__(self, seconds: float, width: int = FEATURES) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(FEATURES, width)

    def forward(self, x: Tensor) -> Tensor:
        CLOCK[0] += self.seconds
        return torch.tanh(self.linear(x))


class SlowNet(Net):
    """Six layers of equal size, of which the first three take three times as long; notes their stages at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Slow(3.0) for _ in range(3)), *(Slow(1.0) for _ in range(2)), Slow(1.0, CLASSES))
        self.stages: list[int] = []

    def on_train_end(self) -> None:
        layout = getattr(self.trainer.strategy, "layout", None)
        self.stages = [] if layout is None else list(layout.stages.plan.values())


SLOW = Case(SlowNet, num=48)


def stages_of(**options: Any) -> list[int]:
    """Train, and tell the stage of each part at the end."""
    module: Any = make_module(SLOW)
    fit(SLOW, module, ModelParallelStrategy(**BY_TIME, **options))
    return module.stages


def test_the_cut_moves_to_where_stages_take_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert stages_of() == [0, 0, 1, 1, 1, 1]  # 6 and 6 seconds in each micro-batch
    told = [record.getMessage() for record in caplog.records if "balance=time" in record.getMessage()]
    assert told == [
        "balance=time: milliseconds of a step's forward passes by stage, 18000.00 6000.00 as it was cut by memory, "
        "12000.00 12000.00 now: net.0, net.1 on cpu | net.2, net.3, net.4, net.5 on cpu"
    ]


def test_a_device_of_twice_the_speed_gets_twice_the_work() -> None:
    # measured on devices of speeds 1 and 2, each layer's work is 3 3 3 2 2 2: 3 | 12 / 2, and not 6 | 9 / 2
    assert stages_of(device_weights=[1, 2]) == [0, 0, 1, 1, 1, 1]
    assert stages_of(device_weights=[1, 5]) == [0, 1, 1, 1, 1, 1]


def test_training_equals_one_device_before_and_after() -> None:
    case = Case(SlowNet, num=46, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
    strategy = ModelParallelStrategy(schedule="gpipe", **BY_TIME)
    assert_equal(run(case, strategy, devices=2), baseline(case), 1e-10)


def test_a_device_for_which_parameters_are_made_anew_is_refused() -> None:
    module: Any = make_module(SLOW)
    devices = [torch.device("cpu"), torch.device("meta")]
    layout = Stages(devices, StageOptions(balance="time", num_microbatches=2, optimizer_copies=0))
    layout.place(module)
    module._trainer = type("Optimized", (), {"optimizers": ["first", "second"]})()
    with pytest.raises(ConfigError, match="optimizers would go on with the old ones"):
        TimeBalance(module, layout).move({f"net.{i}": 3.0 if i < 3 else 1.0 for i in range(6)})


def _train_by_time() -> tuple[list[int], Tensor]:
    """A rank's stages at the end, and the weights."""
    time_balance.time_mark = lambda _: CLOCK[0]
    module: Any = make_module(SLOW)
    if os.environ["RANK"] == "1":  # where the other rank has 3 3 3 1 1 1, which it would cut into 6 and 6 alone
        for layer, seconds in zip(module.net, (9.0, 1.0, 1.0, 1.0, 1.0, 1.0), strict=True):
            layer.seconds = seconds
    strategy = DDPModelParallelStrategy(batch_size_is="global", timeout_s=60, **BY_TIME)
    fit(SLOW, module, strategy, devices=4)
    return module.stages, torch.cat([p.detach().flatten() for p in module.parameters()])


def test_ranks_cut_alike_by_their_average_times_and_train_as_one_device() -> None:
    for stages_found, weights in run_ranks(_train_by_time, 2, timeout_s=100):
        assert stages_found == [0, 1, 1, 1, 1, 1]  # of 6 2 2 1 1 1 on the average: 6 and 7
        assert (weights - baseline(SLOW).weights).abs().max() <= 1e-10
