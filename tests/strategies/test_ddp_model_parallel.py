"""strategy=ddp_model_parallel: 2 processes of 2 stages train as one device does; blocks of devices; checkpoints."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from launching import running
from parity import CASES, Case, GroupsNet, Run, SumNet, TokenNet, baseline, make_module, make_trainer, run
from stage_modules import DEEP, DeepNet, SquareNet

from evener.strategies import (
    STRATEGIES,
    BalancedDDPModelParallelStrategy,
    ConfigError,
    DDPModelParallelStrategy,
)
from evener.trainer import Trainer, compose, train

CPU = torch.device("cpu")


class Synced:
    """Logs the value of all ranks."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(name, value, **{"sync_dist": True, **options})  # type: ignore[misc]


class SyncedDeep(Synced, DeepNet): ...


class SyncedTokens(Synced, TokenNet): ...


class SyncedGroups(Synced, GroupsNet): ...


class SyncedSums(Synced, SumNet):
    """A sum beside a mean over samples."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self(batch[0]).pow(2).mean()


DDP_CASES = {
    "ragged": replace(DEEP, module=SyncedDeep, trainer={}, batch_size=5),
    "accumulated_clipped": replace(DEEP, module=SyncedDeep),
    "loss_weight": Case(SyncedTokens),
    "groups": Case(SyncedGroups, num=9),
    "sums": Case(SyncedSums, num=9),
    "exact_accumulation": Case(
        SyncedTokens, num=22, trainer={"accumulate_grad_batches": 2, "exact_accumulation": True}
    ),
    "smaller_than_ranks": Case(SyncedGroups, num=5, batch_size=2),
    "bf16": replace(CASES["bf16"], module=SyncedGroups),
}
"""Under DDP the loader's batch is the global one, so that one device sees the same."""


def _strategy(**options: Any) -> DDPModelParallelStrategy | BalancedDDPModelParallelStrategy:
    kind = BalancedDDPModelParallelStrategy if "weights" in options else DDPModelParallelStrategy
    return kind(batch_size_is="global", timeout_s=120, **options)


def _run_all(options: list[dict[str, Any]]) -> dict[tuple[str, int], Run]:
    warnings.simplefilter("ignore")  # Lightning's advice
    found = {}
    for index, stage_options in enumerate(options):
        for name, case in DDP_CASES.items():
            if "weights" in stage_options and name not in ("ragged", "loss_weight"):
                continue  # what ranks do is tested with balanced_ddp
            found[name, index] = run(case, _strategy(**stage_options), devices=4)
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_microbatches": 3},
    {"num_microbatches": 2, "weights": [3, 1], "schedule": "gpipe"},
    {"num_microbatches": 2, "weights": "auto"},
]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on logging with sync_dist
def test_two_processes_of_two_stages_train_as_one_device() -> None:
    by_rank = run_ranks(_run_all, 2, OPTIONS, timeout_s=110)
    for (name, index), first in by_rank[0].items():
        case = DDP_CASES[name]
        one, label = baseline(case), f"{name} {OPTIONS[index]}"
        for rank in by_rank:
            difference = (rank[name, index].weights - one.weights).abs().max()
            assert difference <= case.tolerance, f"{label}: weights differ by {difference:.2g}"
            if "accumulate_grad_batches" not in case.trainer:  # within an accumulated step they are the rank's own
                difference = (rank[name, index].gradients - one.gradients).abs().max()
                assert difference <= case.tolerance, f"{label}: gradients differ by {difference:.2g}"
        tolerance = max(case.tolerance, 1e-6)
        assert (first.predictions - one.predictions).abs().max() <= case.tolerance, label
        assert dict(first.tested) == pytest.approx(one.tested, abs=tolerance), label
        assert float(first.metrics["val_loss"]) == pytest.approx(float(one.metrics["val_loss"]), abs=tolerance), label
        assert first.keys == one.keys, label


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


MATRIX = Case(SquareNet, trainer={"gradient_clip_val": 0.1})
DEVICES = {"single_device": 1, "dp": 2, "model_parallel": 2, "ddp": 2, "ddp_model_parallel": 4}
IN_PROCESSES = ("ddp", "ddp_model_parallel")


def _matrix_strategy(name: str) -> Any:
    options: dict[str, Any] = {"batch_size_is": "global", "timeout_s": 30} if name in IN_PROCESSES else {}
    return STRATEGIES[name](**options)


def _save_all(names: list[str], directory: Path) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        trainer = make_trainer(MATRIX, _matrix_strategy(name), devices=DEVICES[name], max_epochs=1)
        trainer.fit(make_module(MATRIX), MATRIX.loader(), MATRIX.loader())
        trainer.save_checkpoint(directory / f"{name}.ckpt")


def _go_on_all(names: list[str], directory: Path) -> dict[tuple[str, str], torch.Tensor]:
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        for saved in DEVICES:
            module = make_module(MATRIX)
            trainer = make_trainer(MATRIX, _matrix_strategy(name), devices=DEVICES[name])
            path = str(directory / f"{saved}.ckpt")
            trainer.fit(module, MATRIX.loader(), MATRIX.loader(), ckpt_path=path, weights_only=True)
            assert trainer.current_epoch == 2
            found[saved, name] = torch.cat([p.detach().flatten() for p in module.parameters()])
    return found


@pytest.mark.filterwarnings("ignore")  # of the way back to stage 0 through tied weights
def test_a_checkpoint_of_any_strategy_goes_on_under_any_other(tmp_path: Path) -> None:
    alone = [name for name in DEVICES if name not in IN_PROCESSES]
    _save_all(alone, tmp_path)
    run_ranks(_save_all, 2, list(IN_PROCESSES), tmp_path, timeout_s=300)
    keys = list(make_module(MATRIX).state_dict())
    for name in DEVICES:
        assert list(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]) == keys
    ranks = run_ranks(_go_on_all, 2, list(IN_PROCESSES), tmp_path, timeout_s=300)
    expected = baseline(MATRIX).weights  # never interrupted, on one device
    for found in (_go_on_all(alone, tmp_path), *ranks):
        for (saved, loaded), weights in found.items():
            difference = (weights - expected).abs().max()
            assert difference <= 1e-10, f"saved by {saved}, loaded by {loaded}: {difference:.2g}"


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


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(tmp_path: Path) -> None:
    with running(
        tmp_path, "strategy=ddp_model_parallel", "devices=4",
        "++module.fault=kill", f"++module.once={tmp_path}/once", "launcher.max_restarts=1",
        "checkpoint=every_n_steps", "checkpoint.every_n_steps=2", "trainer.max_epochs=1",
    ) as run:  # fmt: skip
        assert run.wait(110) == 0, run.output.read_text()
        assert [step for rank, _, step in run.lines() if rank == 1] == [0, 1, 2, 3, *range(2, 64)]


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
