"""strategy=ddp_model_parallel: blocks of devices, and refusals; how it trains: pipeline/test_reduction.py."""

from typing import Any

import pytest
import torch

from evener.strategies import ConfigError, DDPModelParallelStrategy
from evener.trainer import Trainer

CPU = torch.device("cpu")


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
