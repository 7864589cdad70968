"""Hyperparameters come back from a checkpoint as what they were, from plain data, without an import or a call."""

import argparse
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, IntFlag
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from tiny import Tiny, quiet
from torch import nn

from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.file_io import read, write


class Color(Enum):
    RED = "the red"
    BLUE = 2


class Right(IntFlag):
    READ = 1
    WRITE = 2


class Foreign(Enum):
    ONE = 1


@dataclass
class Step:
    size: float
    color: Color = Color.BLUE


@dataclass
class Decay(Step):
    every: timedelta = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Plan:
    first: Step
    folders: tuple[Path, ...] = ()
    made: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.made.append("here")


class Net(Tiny):
    def __init__(
        self, cfg: DictConfig | None = None, layers: ListConfig | None = None, color: Color | None = None,
        plan: "Plan | None" = None, right: Right = Right.READ, where: Path | None = None,
        every: timedelta | None = None, args: argparse.Namespace | None = None, rest: Any = None,
    ) -> None:  # fmt: skip
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


def test_a_config_comes_back_with_the_values_of_its_interpolations(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"lr": 0.1, "net": {"width": 3, "rate": "${lr}", "sizes": [1, "${..width}"]}, "to": "???"})
    OmegaConf.set_struct(cfg, True)
    found = come_back(tmp_path, cfg=cfg, layers=OmegaConf.create([1, {"a": "${0}"}]), rest={"deep": [cfg.net.sizes]})
    plain = {"lr": 0.1, "net": {"width": 3, "rate": 0.1, "sizes": [1, 3]}, "to": "???"}
    assert (type(found.cfg), OmegaConf.is_struct(found.cfg), type(found.layers)) == (DictConfig, True, ListConfig)
    assert (found.cfg, found.layers, found.rest) == (plain, [1, {"a": 1}], {"deep": [[1, 3]]})
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]["cfg"] == plain


def test_a_config_whose_texts_would_be_resolved_anew_stays_plain_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"a": "${of.nobody}", "price": r"\${lr}"}
    assert come_back(tmp_path, cfg=OmegaConf.create(texts)).cfg == texts
    assert "The hyperparameter cfg was a config; it is loaded as {'a': '${of.nobody}'" in caplog.text


def test_a_config_given_as_all_hyperparameters_comes_back(tmp_path: Path) -> None:
    path = saved(Whole(OmegaConf.create({"net": {"width": 3, "out": "${.width}"}})), tmp_path)
    loaded = Whole.load_from_checkpoint(path)
    assert type(loaded.cfg) is DictConfig
    assert loaded.cfg == {"net": {"width": 3, "out": 3}}
    assert loaded.layer.weight.shape == (1, 3)
    other = Whole.load_from_checkpoint(path, cfg=OmegaConf.create({"net": {"width": 3}, "own": 1}))
    assert other.cfg.own == 1, "what is given counts"


def test_what_the_signature_names_comes_back_as_what_it_was(tmp_path: Path) -> None:
    given = {
        "color": Color.RED,
        "plan": Plan(Decay(0.5, Color.RED, timedelta(days=2)), (Path("a"), Path("b/c"))),
        "right": Right.READ | Right.WRITE,
        "where": Path("data/x"),
        "every": timedelta(days=-1, microseconds=7),
        "args": argparse.Namespace(lr=0.1, to=Path("x")),
        "rest": [frozenset({1}), Path("p"), OmegaConf.create({"at": Path("y"), "color": Color.BLUE})],
    }
    found = come_back(tmp_path, **given)
    for name, value in given.items():
        assert found[name] == value, name
        assert type(found[name]) is type(value), name
    assert type(found.rest[0]) is frozenset
    assert found.plan.made == ["here"], "no method of the class ran"


def test_a_class_that_the_signature_does_not_name_stays_plain_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        found = come_back(tmp_path, rest=[Foreign.ONE, nn.functional.relu])
    assert found.rest[0] == "ONE"
    assert found.rest[1].startswith("<function relu")
    assert caplog.text.count("The hyperparameter hyper_parameters.rest.1 is stored as a string") == 1
    assert "The hyperparameter rest.0 was a test_hparams.Foreign; it is loaded as 'ONE'" in caplog.text
    assert "The hyperparameter rest.1 was a builtins.function; it is loaded as '<function relu" in caplog.text


class RunsCode:
    def __init__(self) -> None:
        raise AssertionError("a class of the file's choice was called")


@pytest.mark.parametrize(
    "kinds",
    [
        7, {"hyper_parameters": [[[[1]], "path", None]]}, {"hyper_parameters": [[["rest"], "none", None]]},
        {"hyper_parameters": [[["rest"], "dataclass", "test_hparams.RunsCode"]]},
        {"hyper_parameters": [[["rest"], "dataclass", "test_hparams.Plan"]]},
        {"hyper_parameters": [[["rest"], "enum", ["this.left", None]]]},
        {"hyper_parameters": [[["rest"], "config", {"texts": [[["a"], "${eval:1}"]]}]]},
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


def test_hooks_and_resumed_runs_see_what_was_saved(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sees(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            ours = {"evener_hparams", "exact_resume", "evener_file"} & checkpoint.keys()
            seen.append((checkpoint["hyper_parameters"]["cfg"], ours))

    loader = torch.utils.data.DataLoader(torch.ones(2, 1))  # pyright: ignore[reportArgumentType]
    for epochs, path in ((1, None), (2, str(tmp_path / "last.ckpt"))):
        module = Sees(cfg=OmegaConf.create({"a": 1, "b": "${a}"}))
        quiet(max_epochs=epochs, callbacks=[Checkpoint(tmp_path)]).fit(module, loader, ckpt_path=path)
    Sees.load_from_checkpoint(tmp_path / "last.ckpt")
    assert [(type(cfg), ours) for cfg, ours in seen] == [(DictConfig, set())] * 2
