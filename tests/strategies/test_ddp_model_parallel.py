"""strategy=ddp_model_parallel: blocks of devices, and refusals; how it trains: pipeline/test_reduction.py."""

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


def test_what_the_wrapper_can_not_reduce_is_refused() -> None:
    strategy = Local(num_microbatches=2, static_graph=True)
    strategy.parallel_devices = [CPU, CPU]
    with pytest.raises(ConfigError, match="ddp_model_parallel: static_graph=true needs one backward pass per step"):
        strategy.setup(Trainer(accelerator="cpu", devices=1, logger=False))
