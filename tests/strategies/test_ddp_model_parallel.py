"""strategy=ddp_model_parallel: 2 processes of 2 stages train as one device does; blocks of devices."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import CASES, Case, GroupsNet, Run, SumNet, assert_equal, baseline, run
from stage_modules import DEEP

from evener.strategies import (
    BalancedDDPModelParallelStrategy,
    ConfigError,
    DDPModelParallelStrategy,
)
from evener.trainer import Trainer, compose, train

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
    [(4, 2, [[0, 1], [2, 3]]), (8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]), (6, 3, [[0, 1, 2], [3, 4, 5]])],
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
    with pytest.raises(ConfigError, match="1 devices don't divide into processes of 2 devices"):
        DDPModelParallelStrategy.count_processes(1)
    assert DDPModelParallelStrategy.count_processes(8, model_parallel_size=2, timeout_s=3) == 4
    assert DDPModelParallelStrategy.count_processes(8) == 4
    with pytest.raises(ConfigError, match="3 devices don't divide into processes of 2 devices"):
        Trainer(strategy="ddp_model_parallel", devices=3, accelerator="cpu", logger=False)


COMMAND = (
    "experiment=char_lm strategy.batch_size_is=global seed=1 accelerator=cpu trainer.max_steps=4 module.width=16 "
    "module.num_blocks=2 module.num_heads=2 trainer.limit_val_batches=2 trainer.val_check_interval=4 checkpoint=none "
    "logger=none trainer.enable_progress_bar=false trainer.enable_model_summary=false test_after_fit=false"
)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders, as the command shows it
def test_the_command_trains_the_transformer_on_four_cpu_devices_in_two_processes(tmp_path: Path) -> None:
    words = COMMAND.split()
    cut = ["strategy=ddp_model_parallel", "devices=4", "strategy.model_parallel_size=2", "strategy.num_microbatches=2"]
    many = train(compose([*words, *cut, f"log_dir={tmp_path}"]))
    assert (many.num_processes, many.devices) == (2, ["cpu"] * 4)
    one = train(compose([*[w for w in words if "batch_size_is" not in w], f"log_dir={tmp_path}"]))
    assert (many.num_steps, one.num_steps) == (4, 4)
    assert many.metrics["val/loss"] == pytest.approx(one.metrics["val/loss"], rel=1e-5)


def test_the_static_graph_is_refused_with_micro_batches() -> None:
    strategy = Local(num_microbatches=2, static_graph=True)
    strategy.parallel_devices = [CPU, CPU]
    with pytest.raises(ConfigError, match="ddp_model_parallel: static_graph=true needs one backward pass per step"):
        strategy.setup(Trainer(accelerator="cpu", devices=1, logger=False))


def test_stages_of_several_device_types_are_refused() -> None:
    strategy = DDPModelParallelStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0), CPU]
    alone: Any = type("Alone", (), {"local_rank": lambda self: 0})()
    strategy.cluster_environment = alone
    with pytest.raises(ConfigError, match=r"ddp_model_parallel: the stages of a process are on cuda:0, cpu, but DDP"):
        strategy.setup(Trainer(accelerator="cpu", devices=1, logger=False))
