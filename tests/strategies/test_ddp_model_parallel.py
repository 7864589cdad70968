"""strategy=ddp_model_parallel: 2 processes of 2 stages train as one device does; blocks of devices."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import CASES, Case, GroupsNet, Run, SumNet, assert_equal, baseline, run
from stage_modules import DEEP

from evener.strategies import BalancedDDPModelParallelStrategy, ConfigError, DDPModelParallelStrategy
from evener.trainer import Trainer

CPU = torch.device("cpu")


class SumAndMean(SumNet):
    """A sum beside a mean over samples."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self(batch[0]).pow(2).mean()


TRAINED = {
    "ragged": replace(DEEP, trainer={}, batch_size=5),
    "accumulated_clipped": DEEP,
    "loss_weight": CASES["loss_weight"],
    "groups": Case(GroupsNet, num=9),
    "sums": Case(SumAndMean, num=9),
    "exact_accumulation": CASES["exact_accumulation_of_weights"],
    "smaller_than_ranks": Case(GroupsNet, num=5, batch_size=2),
    "bf16": replace(CASES["bf16"], module=GroupsNet),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_microbatches": 3},
    {"num_microbatches": 2, "weights": [3, 1], "schedule": "gpipe"},
    {"num_microbatches": 2, "weights": "auto"},
]


def _run_all() -> dict[tuple[str, int], Run]:
    warnings.simplefilter("ignore")  # Lightning's advice
    found = {}
    for index, options in enumerate(OPTIONS):
        kind = BalancedDDPModelParallelStrategy if "weights" in options else DDPModelParallelStrategy
        for name, case in TRAINED.items():
            if "weights" not in options or name in ("ragged", "loss_weight"):  # else as with balanced_ddp
                strategy = kind(batch_size_is="global", timeout_s=120, **options)
                found[name, index] = run(case, strategy, devices=4)
    return found


def test_two_processes_of_two_stages_train_as_one_device() -> None:
    first, other = run_ranks(_run_all, 2)
    for (name, index), found in first.items():
        case = TRAINED[name]
        assert_equal(found, baseline(case), case.tolerance, of_a_rank=True)
        torch.testing.assert_close(other[name, index].weights, found.weights, rtol=0, atol=1e-12)


class Local(DDPModelParallelStrategy):
    """As rank `local` of a node."""

    local = 0

    @property
    def local_rank(self) -> int:
        return self.local


@pytest.mark.parametrize(
    ("num_devices", "size", "blocks"),
    [(8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]), (6, 3, [[0, 1, 2], [3, 4, 5]])],
)
def test_each_rank_owns_its_block(num_devices: int, size: int, blocks: list[list[int]]) -> None:
    strategy = Local(model_parallel_size=size)
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(num_devices)]
    assert strategy.num_processes == len(blocks)
    for strategy.local, block in enumerate(blocks):
        assert [device.index for device in strategy.process_devices] == block
        assert strategy.root_device == torch.device("cuda", block[0])
    assert strategy.determine_ddp_device_ids() is None


def test_indivisible_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="7 devices don't divide into processes of 2 devices"):
        DDPModelParallelStrategy.count_processes(7, model_parallel_size=2, num_microbatches=4)
    assert DDPModelParallelStrategy.count_processes(8) == 4
    with pytest.raises(ConfigError, match="3 devices don't divide into processes of 2 devices"):
        Trainer(strategy="ddp_model_parallel", devices=3, accelerator="cpu", logger=False)


@pytest.mark.parametrize(
    ("options", "devices", "told"),
    [
        (
            {"num_microbatches": 2, "static_graph": True},
            [CPU, CPU],
            "static_graph=true needs one backward pass per step",
        ),
        ({}, [torch.device("cuda", 0), CPU], "the stages of a process are on cuda:0, cpu, but DDP"),
    ],
)
def test_what_the_wrapper_can_not_reduce_is_refused(options: dict[str, Any], devices: list[Any], told: str) -> None:
    strategy = Local(**options)
    strategy.parallel_devices = devices
    with pytest.raises(ConfigError, match=f"ddp_model_parallel: {told}"):
        strategy.setup(Trainer(accelerator="cpu", devices=1, logger=False))
