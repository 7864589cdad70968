"""Checkpoints of sharded modules are whole: any strategy, on any number of ranks, goes on from them."""

from pathlib import Path
from typing import Any

import torch
from distributed import run_ranks
from pytorch_lightning.callbacks import EMAWeightAveraging
from regression import Net, Numbered, quiet_trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from evener.trainer.checkpoint import Checkpoint

STRATEGIES: dict[str, Any] = {"fsdp": FSDPStrategy, "ddp": DDPStrategy}


def _train(kind: str, num_ranks: int, source: Path | None, target: Path | None, averages: bool = False) -> Tensor:
    """Train for two epochs of four batches of all ranks, from a checkpoint, or saving one after every step."""
    strategy = SingleDeviceStrategy() if kind == "one" else STRATEGIES[kind](batch_size_is="global", timeout_s=60)
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.7)] if averages else []
    if target is not None:
        callbacks.append(Checkpoint(target, "{step}", every_n_steps=1, save_top_k=-1))
    module = Net()
    trainer = quiet_trainer(strategy, num_ranks, callbacks=callbacks, enable_checkpointing=target is not None)
    trainer.fit(module, DataLoader(Numbered(), 6), ckpt_path=source)
    return weights(module)


def _trained(kind: str, num_ranks: int, *args: Any) -> list[Tensor]:
    return [_train(kind, 1, *args)] if kind == "one" else run_ranks(_train, num_ranks, kind, num_ranks, *args)


def test_a_whole_checkpoint_holds_plain_tensors_under_the_modules_names(tmp_path: Path) -> None:
    for kind, num in (("one", 1), ("fsdp", 3)):
        _trained(kind, num, None, tmp_path / kind)
    one, cut = (torch.load(tmp_path / kind / "2.ckpt", weights_only=True) for kind in ("one", "fsdp"))
    assert list(cut["state_dict"]) == list(one["state_dict"])
    for name, value in one["state_dict"].items():
        assert type(cut["state_dict"][name]) is Tensor
        torch.testing.assert_close(cut["state_dict"][name], value, rtol=0, atol=1e-10)
    for index, entry in one["optimizer_states"][0]["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(cut["optimizer_states"][0]["state"][index][name], value, rtol=0, atol=1e-10)


def test_a_run_goes_on_under_any_strategy_and_number_of_ranks(tmp_path: Path) -> None:
    (expected,) = _trained("one", 1, None, tmp_path / "one")
    _trained("fsdp", 2, None, tmp_path / "fsdp")
    for source, kind, num in (
        ("fsdp", "fsdp", 2), ("fsdp", "fsdp", 3), ("fsdp", "ddp", 2), ("one", "fsdp", 2), ("fsdp", "one", 1),
    ):  # fmt: skip
        for rank in _trained(kind, num, tmp_path / source / "2.ckpt", None):
            torch.testing.assert_close(rank, expected, rtol=0, atol=1e-10, msg=lambda text: f"{source}, {kind}: {text}")  # noqa: B023


def test_the_moving_average_goes_on_too(tmp_path: Path) -> None:
    (expected,) = _trained("one", 1, None, None, True)
    _trained("fsdp", 2, None, tmp_path, True)
    for kind, num in (("one", 1), ("fsdp", 3)):
        for rank in _trained(kind, num, tmp_path / "2.ckpt", None, True):
            torch.testing.assert_close(rank, expected, rtol=0, atol=1e-10)
