"""Checkpoints of sharded modules, in shards and whole: any strategy, on any number of ranks, goes on from them."""

import os
import shutil
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks, run_ranks_unchecked
from pytorch_lightning.callbacks import EMAWeightAveraging
from regression import Net, Numbered, assert_same, quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.file_io import CheckpointError, find_newest, good_or_newest, read, shard_file

STRATEGIES: dict[str, Any] = {"fsdp": FSDPStrategy, "ddp": DDPStrategy, "one": SingleDeviceStrategy}


class Odd(Net):
    """Parameters that don't divide evenly, one without a dimension, one in bfloat16, tied ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(3, 5).double()
        self.tied = nn.Linear(3, 5).double()
        self.tied.weight = self.odd.weight
        self.coarse = nn.Linear(3, 5).bfloat16().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("average", torch.arange(400.0, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.average += batch_idx
        found = super().training_step(batch, batch_idx)
        return found + (self.odd(batch[0]) * self.tied(batch[0]) * self.scale).square().mean()


class Configured(Net):
    """Large layers that are never whole on a rank, with values drawn and written in many ways, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module | None = None

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 3))
            self.lift = nn.Linear(3, 64)
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("mask", torch.rand(64, 64))
            nn.init.trunc_normal_(self.body[2].weight, std=0.1)
            self.kept = nn.ModuleList([nn.Linear(80, 90), nn.Embedding(100, 80), nn.LayerNorm(5000), nn.LSTM(40, 40)])
            self.kept.requires_grad_(False)
            self.kept[0].weight *= 0.5
            self.kept[0].weight[3:60] += torch.rand(80)
            nn.init.orthogonal_(self.kept[3].weight_ih_l0)
            self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        assert self.body is not None
        out = self.net(self.scale * self.body(self.lift(x) @ self.get_buffer("mask")))
        return (out - y).square().mean()


def _train(
    kind: str, num_ranks: int, source: Path | None, target: Path | None, sharded: bool = True, **options: Any
) -> Tensor:
    """Train for two epochs of four batches of all ranks, from a checkpoint, or saving one after every step."""
    module = options.pop("module", Odd)()
    batches: list[int] = []
    module.on_train_batch_start = lambda batch, batch_idx: batches.append(batch_idx)
    given = {name: options.pop(name) for name in ("replicas", "timeout_s") if name in options}
    ranked = {} if kind == "one" else {"batch_size_is": "global", "timeout_s": 60, **given}
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.7)] if options.pop("averages", False) else []
    if target is not None:
        policy = {"every_n_steps": 1, "save_top_k": -1, **options}
        callbacks.append(Checkpoint(target, "{step}", sharded=sharded, **policy))
    saving: Any = {"callbacks": callbacks, "enable_checkpointing": target is not None}
    trainer = quiet_trainer(STRATEGIES[kind](**ranked), num_ranks, **saving)
    torch.manual_seed(5)
    trainer.fit(module, DataLoader(Numbered(), 6), ckpt_path=source)
    if source is None or source.stem != "last":
        assert batches == [0, 1, 2, 3, 0, 1, 2, 3][0 if source is None else int(source.stem) :]
    return weights(module)


def _trained(kind: str, num_ranks: int, *args: Any, **options: Any) -> list[Tensor]:
    if kind == "one":
        return [_train(kind, 1, *args, **options)]
    return run_ranks(partial(_train, **options), num_ranks, kind, num_ranks, *args)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after each of the 8 steps: of one device, of 2 ranks, and in shards, while training went on."""
    folder = tmp_path_factory.mktemp("saved")
    _trained("one", 1, None, folder / "one", False)
    _trained("fsdp", 2, None, folder / "whole", False)
    _trained("fsdp", 2, None, folder / "shards", background=True)
    return folder


def _assert_equal_states(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for key in ("state_dict", "optimizer_states"):
        assert_same(found[key], expected[key], tolerance, key)


def test_shards_hold_what_a_whole_checkpoint_of_the_same_step_and_one_of_one_device_hold(saved: Path) -> None:
    """They are written in the background, while training changes the weights; whole ones are plain tensors."""
    for step in range(1, 9):
        assert shard_file(saved / f"shards/{step}.ckpt") is not None
        _assert_equal_states(read(saved / f"shards/{step}.ckpt"), read(saved / f"whole/{step}.ckpt"))
    cut, one = (torch.load(saved / kind / "2.ckpt", weights_only=True) for kind in ("whole", "one"))
    _assert_equal_states(cut, one, 1e-10)


@pytest.mark.slow
def test_groups_of_ranks_write_each_row_once(tmp_path: Path) -> None:
    """Of 4 ranks in 2 groups, those of the first write; without the thread, too."""
    for kind in (True, False):
        _trained("fsdp", 4, None, tmp_path / str(kind), kind, replicas=2)
    for step in (1, 8):
        assert shard_file(tmp_path / "True" / f"{step}.ckpt") is not None
        _assert_equal_states(*(read(tmp_path / str(kind) / f"{step}.ckpt") for kind in (True, False)))


@pytest.mark.parametrize(
    ("source", "kind", "num"),
    [
        ("shards", "fsdp", 3), ("shards", "one", 1), ("whole", "fsdp", 3), ("whole", "ddp", 2), ("one", "fsdp", 2),
        *(pytest.param("shards", *way, marks=pytest.mark.slow) for way in (("fsdp", 1), ("fsdp", 2), ("ddp", 2))),
    ],
)  # fmt: skip
def test_a_run_goes_on_under_any_strategy_and_number_of_ranks(saved: Path, source: str, kind: str, num: int) -> None:
    """In the middle of the first epoch."""
    (expected,) = _trained("one", 1, None, None)
    for rank in _trained(kind, num, saved / source / "2.ckpt", None):
        torch.testing.assert_close(rank, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("sharded", "options"),
    [
        (False, {"averages": True}), pytest.param(True, {"averages": True}, marks=pytest.mark.slow),
        (False, {"module": Configured}),
    ],
)  # fmt: skip
def test_averages_and_layers_of_configure_model_go_on_too(
    sharded: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    (expected,) = _trained("one", 1, None, None, **options)
    found = _trained("fsdp", 2, None, tmp_path, sharded, **options)
    for kind, num in (("one", 1), ("fsdp", 3)):
        found += _trained(kind, num, tmp_path / "2.ckpt", None, **options)
    for weights_found in found:
        torch.testing.assert_close(weights_found, expected, rtol=0, atol=1e-10)


def test_a_checkpoint_that_is_replaced_or_removed_takes_its_tensors_along(tmp_path: Path) -> None:
    left = tmp_path / f"shards-{os.uname().nodename}-4194304-1"  # of a process that can't exist
    left.touch()
    _trained("fsdp", 2, None, tmp_path, save_top_k=1)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["8.ckpt", "last.ckpt"]
    named = {shard_file(path) for path in tmp_path.glob("*.ckpt")}
    assert len(named) == 1  # last.ckpt is a second name
    assert set(tmp_path.glob("shards-*")) == named
    assert find_newest(tmp_path) in set(tmp_path.glob("*.ckpt"))


def test_what_is_missing_or_damaged_is_named_and_passed_over(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved / "shards", tmp_path, dirs_exist_ok=True)
    damaged, missing = (shard_file(tmp_path / f"{step}.ckpt") for step in (8, 7))
    assert damaged is not None
    assert missing is not None
    with open(damaged, "r+b") as file:
        file.write(b"\xff\xfe")
    missing.unlink()
    (tmp_path / "last.ckpt").unlink()
    with pytest.raises(CheckpointError, match=r"8\.ckpt is corrupted: the checksum of .*shards-.* does not match"):
        read(tmp_path / "8.ckpt")
    with pytest.raises(CheckpointError, match=r"7\.ckpt is incomplete: shards-.*, which must lie beside it"):
        read(tmp_path / "7.ckpt")
    assert find_newest(tmp_path) == good_or_newest(tmp_path / "8.ckpt") == tmp_path / "6.ckpt"


def _killed(num_ranks: int, target: Path, victim: int) -> None:
    """Train until one rank dies in the middle of writing its rows after the third step."""
    from evener.trainer.checkpoint import checkpoint_io

    own, num = zlib.crc32, [0]

    def dying(*args: Any) -> int:
        num[0] += 1
        if int(os.environ["RANK"]) == victim and num[0] > 50:
            os._exit(0)
        return own(*args)

    checkpoint_io.zlib = SimpleNamespace(crc32=dying)  # of each tensor's rows
    _train("fsdp", num_ranks, None, target, background=True, timeout_s=10)  # which the other rank waits for


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_write_that_was_killed_never_becomes_the_newest_checkpoint(tmp_path: Path, victim: int) -> None:
    run_ranks_unchecked(_killed, 2, 2, tmp_path, victim, timeout_s=30)
    found = sorted(tmp_path.glob("*.ckpt"))
    assert found
    for path in found:
        read(path)
    newest = find_newest(tmp_path)
    assert newest is not None
    named = {shard_file(path) for path in found}
    assert set(tmp_path.glob("shards-*")) > named  # the file of the killed write
    (expected,) = _trained("one", 1, None, None)
    (found_weights, _) = _trained("fsdp", 2, newest, None)
    torch.testing.assert_close(found_weights, expected, rtol=0, atol=1e-10)


def test_strategies_without_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sharded=true needs a strategy with shards, strategy=fsdp; got SingleDevice"):
        _train("one", 1, None, tmp_path)


def _two_ways(directory: Path) -> Tensor:
    callbacks = [Checkpoint(directory / str(way), every_n_steps=2, sharded=way) for way in (True, False)]
    saving: Any = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 1}
    module = Odd()
    quiet_trainer(FSDPStrategy(batch_size_is="global"), 2, **saving).fit(module, DataLoader(Numbered(), 6))
    return weights(module)


def test_each_of_two_callbacks_writes_its_own_way(tmp_path: Path) -> None:
    """The plugin of the callback that was set up last wrote the checkpoints of both."""
    trained, _ = run_ranks(_two_ways, 2, tmp_path)
    for way in (True, False):
        last = tmp_path / str(way) / "last.ckpt"
        assert (shard_file(last) is not None) == way
        assert len(list(last.parent.glob("shards-*"))) <= 2 * way
        loaded = Odd.load_from_checkpoint(last, map_location="cpu", weights_only=True)
        torch.testing.assert_close(weights(loaded), trained, rtol=0, atol=0)
    places = torch.load(tmp_path / "True" / "last.ckpt", weights_only=True)["state_dict"]
    assert places["net.0.weight"] == {"evener_place": [0, "float64", [4, 3], [3, 1]]}
