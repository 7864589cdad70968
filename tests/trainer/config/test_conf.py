"""Every file of every configuration group composes and builds what it names."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

import evener.conf
from evener.strategies import STRATEGIES
from evener.trainer import compose
from evener.trainer.cli.train import prepare
from evener.trainer.job.run import build

CONF = Path(next(iter(evener.conf.__path__)))
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_"))
CHOICES = [f"{group}={file.stem}" for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))]


def prepared(tmp_path: Path, *overrides: str) -> DictConfig:
    return prepare(compose([f"log_dir={tmp_path}", "accelerator=cpu", *overrides]))


def companions(choice: str) -> list[str]:
    """What a choice needs beside it: several devices, the data that a module is made for, or a class."""
    group, option = choice.split("=")
    if option == "custom":
        kind = {"module": "DigitsClassifier", "data": "DigitsDataModule"}[group]
        return [f"{group}._target_=evener.examples.digits.{kind}"]
    if group == "module" and f"data={option}" in CHOICES:
        return [f"data={option}"]
    return ["devices=2"] if group == "strategy" and option != "single_device" else []


def test_every_group_of_the_design_exists() -> None:
    expected = "callbacks checkpoint data debug experiment hydra launcher logger module strategy trainer"
    assert expected.split() == GROUPS


def test_checkpoint_has_all_six_policies() -> None:
    policies = {choice.split("=")[1] for choice in CHOICES if choice.startswith("checkpoint=")}
    assert policies == {"best", "last", "every_n_steps", "every_n_epochs", "interval", "none"}


@pytest.mark.parametrize("choice", [c for c in CHOICES if not c.startswith(("hydra=", "strategy=fsdp", "data=none"))])
def test_every_choice_composes_and_builds(choice: str, tmp_path: Path) -> None:
    parts = build(prepared(tmp_path, choice, *companions(choice)))
    group, option = choice.split("=")
    if group == "strategy" and option in STRATEGIES:
        assert type(parts.trainer.strategy) is STRATEGIES[option]
    assert parts.module is not None


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_has_a_config_of_its_name(name: str) -> None:
    assert f"strategy={name}" in CHOICES


def test_without_a_data_config_the_module_brings_its_loaders(tmp_path: Path) -> None:
    assert build(prepared(tmp_path, "data=none")).data is None


def unexplained(file: Path) -> list[str]:
    """Options of a config file with no comment above them, beside them, or above the group they stand in."""
    lines = file.read_text().splitlines()
    found: list[str] = []
    explained = False
    for line in lines:
        text = line.strip()
        if not text or text.startswith(("_target_", "defaults:", "- ")):
            explained = False if not text else explained
        elif text.startswith("#"):
            explained = True
        elif not explained and "#" not in text:
            found.append(f"{file.name}: {text}")
    return found


@pytest.mark.parametrize("group", ["checkpoint", "launcher", "logger", "strategy", "trainer"])
def test_every_option_is_explained(group: str) -> None:
    assert [line for file in sorted((CONF / group).glob("*.yaml")) for line in unexplained(file)] == []


def test_resolved_config_has_no_interpolation_left(tmp_path: Path) -> None:
    assert "${" not in OmegaConf.to_yaml(prepared(tmp_path))


def test_preparing_leaves_the_given_config_unchanged(tmp_path: Path) -> None:
    cfg = compose([f"log_dir={tmp_path}"])
    before = OmegaConf.to_yaml(cfg)
    prepare(cfg)
    assert OmegaConf.to_yaml(cfg) == before
