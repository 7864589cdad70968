"""Hyperparameters come back from a checkpoint from plain data, without an import or a call."""

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from tiny import Tiny, quiet
from torch import nn

from evener.trainer.checkpoint.file_io import read, write


class Color(Enum):
    RED = "the red"


@dataclass(slots=True)
class Step:
    size: float
    where: Path


class Net(Tiny):
    def __init__(self, cfg: DictConfig | None = None, layers: ListConfig | None = None, rest: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Whole(Tiny):
    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg.net.width)
        self.save_hyperparameters(cfg)
        self.cfg = cfg


def saved(module: pl.LightningModule, folder: Path) -> Path:
    trainer = quiet()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def come_back(folder: Path, **given: Any) -> Any:
    return Net.load_from_checkpoint(saved(Net(**given), folder)).hparams


def test_configs_come_back_with_the_values_of_their_interpolations(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"lr": 0.1, "net": {"width": 3, "rate": "${lr}", "sizes": [1, "${..width}"]}, "to": "???"})
    OmegaConf.set_struct(cfg, True)
    rest = {"deep": [cfg.net.sizes], "at": Path("a/b")}
    found = come_back(tmp_path, cfg=cfg, layers=OmegaConf.create([1, {"a": "${0}"}]), rest=rest)
    plain = {"lr": 0.1, "net": {"width": 3, "rate": 0.1, "sizes": [1, 3]}, "to": "???"}
    assert (type(found.cfg), OmegaConf.is_struct(found.cfg), type(found.layers)) == (DictConfig, True, ListConfig)
    assert (found.cfg, found.layers) == (plain, [1, {"a": 1}])
    assert found.rest == {"deep": [[1, 3]], "at": Path("a/b")}
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]["cfg"] == plain
    path = saved(Whole(OmegaConf.create({"net": {"width": 3, "out": "${.width}"}})), tmp_path)  # all hyperparameters
    loaded = Whole.load_from_checkpoint(path)
    assert (type(loaded.cfg), loaded.cfg) == (DictConfig, {"net": {"width": 3, "out": 3}})
    assert loaded.layer.weight.shape == (1, 3)
    other = Whole.load_from_checkpoint(path, cfg=OmegaConf.create({"net": {"width": 3}, "own": 1}))
    assert other.cfg.own == 1, "what is given counts"


def test_what_is_not_plain_is_loaded_as_plain_data_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        found = come_back(tmp_path, rest=[Color.RED, nn.functional.relu, Step(0.5, Path("x"))])
    assert found.rest[0] == "the red"
    assert found.rest[1].startswith("<function relu")
    assert found.rest[2] == {"size": 0.5, "where": Path("x")}
    assert caplog.text.count("The hyperparameter hyper_parameters.rest.1 is stored as a string") == 1
    assert "The hyperparameter rest.0 was a test_hparams.Color; it is loaded as 'the red'" in caplog.text
    assert "The hyperparameter rest.1 was a builtins.function; it is loaded as '<function relu" in caplog.text
    assert "The hyperparameter rest.2 was a test_hparams.Step; it is loaded as {'size': 0.5" in caplog.text


@pytest.mark.parametrize(
    "kinds",
    [
        7, {"hyper_parameters": [[[[1]], "path", None]]}, {"hyper_parameters": [[["rest"], "none", None]]},
        {"hyper_parameters": [[["rest"], "dataclass", "test_hparams.Step"]]},  # of an earlier version's file
        {"hyper_parameters": [[["rest"], "enum", ["this.left", None]]]},
        {"hyper_parameters": [[["rest"], "config", {"struct": None, "readonly": None}]]},
    ],
)  # fmt: skip
def test_a_crafted_kind_leaves_plain_data_and_runs_nothing(kinds: Any, tmp_path: Path) -> None:
    called: list[Any] = []
    OmegaConf.register_new_resolver("eval", called.append, replace=True)
    checkpoint = read(saved(Net(rest={"a": "${eval:1}"}), tmp_path))
    write({**checkpoint, "evener_hparams": kinds}, tmp_path / "b.ckpt")
    Net.load_from_checkpoint(tmp_path / "a.ckpt")  # the first one imports what Lightning reads files with
    before = set(sys.modules)
    found: Any = Net.load_from_checkpoint(tmp_path / "b.ckpt").hparams
    assert found.rest == {"a": "${eval:1}"}
    assert not called
    assert set(sys.modules) == before
