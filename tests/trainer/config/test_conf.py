"""Every file of every configuration group composes and builds what it names."""

import re
from pathlib import Path

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from seen import command

import evener.conf
from evener.strategies import STRATEGIES, ConfigError
from evener.trainer import compose
from evener.trainer.cli.train import prepare
from evener.trainer.config.composing import PACKAGE
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
        if group == "logger":
            return ["logger.custom._target_=pytorch_lightning.loggers.CSVLogger", "+logger.custom.save_dir=unused"]
        if group == "strategy":
            return ["strategy._target_=evener.strategies.SingleDeviceStrategy"]
        kind = {"module": "DigitsClassifier", "data": "DigitsDataModule"}[group]
        return [f"{group}._target_=evener.examples.digits.{kind}", *(["data=digits"] if group == "module" else [])]
    if group == "module" and f"data={option}" in CHOICES:
        return [f"data={option}"]
    return ["devices=2"] if group == "strategy" and option != "single_device" else []


def test_every_group_policy_and_strategy_has_its_file() -> None:
    expected = "callbacks checkpoint data debug experiment extras hparams_search hydra launcher logger module paths"
    assert [*expected.split(), "strategy", "trainer"] == GROUPS == PACKAGE.groups()
    policies = {choice.split("=")[1] for choice in CHOICES if choice.startswith("checkpoint=")}
    assert policies == {"best", "last", "every_n_steps", "every_n_epochs", "interval", "none"}
    assert {f"strategy={name}" for name in STRATEGIES} <= set(CHOICES)


NOT_BUILT = ("hydra=", "strategy=lightning_fsdp", "logger=comet", "logger=mlflow", "logger=wandb")


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if not choice.startswith(NOT_BUILT)])
def test_every_choice_composes_and_builds(choice: str, tmp_path: Path) -> None:
    if choice == "hparams_search=optuna":
        pytest.importorskip("optuna", reason="optuna is not installed; pip install evener[optuna]")
    parts = build(prepared(tmp_path, choice, *companions(choice)))
    group, option = choice.split("=")
    if group == "strategy" and option in STRATEGIES:
        assert type(parts.trainer.strategy) is STRATEGIES[option]
    assert parts.module is not None


def unexplained(file: Path) -> list[str]:
    """Options of a config file with no comment above them, beside them, or above the group they stand in."""
    found: list[str] = []
    explained = False
    for line in file.read_text().splitlines():
        text = line.strip()
        if not text:
            explained = False
        elif text.startswith("#"):
            explained = True
        elif not explained and "#" not in text and not text.startswith(("_target_", "defaults:", "- ")):
            found.append(f"{file.name}: {text}")
    return found


def test_every_option_is_explained() -> None:
    groups = ("checkpoint", "launcher", "logger", "strategy", "trainer")
    assert [line for group in groups for file in CONF.glob(f"{group}/*.yaml") for line in unexplained(file)] == []


def explained(file: str) -> dict[str, str]:
    """Each option of a file with its default and the comments above and beside it, as they stand there."""
    paragraphs = re.findall(r"^((?:#.*\n)*)(\w+):(.*)$", PACKAGE.text(file), re.MULTILINE)
    return {key: above + rest for above, key, rest in paragraphs if key not in ("_target_", "defaults")}


def differing(*files: str) -> set[str]:
    """Options that several files have, with another default or another comment."""
    found: dict[str, set[str]] = {}
    for file in files:
        for key, text in explained(file).items():
            found.setdefault(key, set()).add(text)
    return {key for key, texts in found.items() if len(texts) > 1}


DIFFERING = {"weights", "hysteresis", "find_unused_parameters", "batch_dims", "cpu_offload"}
"""Options whose meaning or default differs between strategies."""


def test_keys_that_files_share_have_one_default_and_one_explanation() -> None:
    assert len(explained("strategy/ddp")) > 15
    found = differing(*(f"strategy/{name}" for name in PACKAGE.files("strategy")))
    assert found - DIFFERING == set()
    assert differing(*(f"strategy/{name}" for name in PACKAGE.files("strategy") if "ddp" in name)) == set()
    assert differing("checkpoint/last", "checkpoint/every_n_steps", "checkpoint/interval") == {"save_top_k"}


def test_accumulated_batches_count_by_their_samples_by_default() -> None:
    assert compose([]).trainer.exact_accumulation is True  # as docs/law_1.md says; no file said it


def test_files_are_composed_inside_a_run_of_hydra_which_goes_on() -> None:
    """A `mode=compare` of the command line ended: GlobalHydra is already initialized."""
    with initialize_config_module("evener.conf", version_base="1.3"):
        running = GlobalHydra.instance().hydra
        assert PACKAGE.compose(["strategy=ddp"]).strategy.timeout_s == 1800
        with pytest.raises(MissingConfigException):
            PACKAGE.compose(["strategy=ddpp"])
        assert GlobalHydra.instance().hydra is running
    assert not GlobalHydra.instance().is_initialized()


def test_a_project_has_values_of_its_machine_in_local_default(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\nlog_dir: elsewhere\n")
    (tmp_path / "mine.yaml").write_text("hydra:\n  searchpath: [pkg://evener.conf]\ndefaults: [train, _self_]\n")
    assert compose(config_name="mine", config_dir=tmp_path).log_dir == "elsewhere"
    assert compose().log_dir == "logs"


def test_names_of_lightning_hydra_template_are_folders_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROJECT_ROOT", "/mine")
    cfg = prepared(tmp_path)
    assert (cfg.paths.data_dir, cfg.paths.log_dir, cfg.paths.output_dir) == ("/mine/data", str(tmp_path), cfg.run_dir)


def test_tags_are_asked_for_on_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tags=\[\] is refused by extras\.enforce_tags=true\. Give some"):
        prepared(tmp_path, "extras.enforce_tags=true")
    assert prepared(tmp_path, "extras.enforce_tags=true", "tags=[first]").tags == ["first"]


def test_the_configuration_is_printed_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["extras.print_config=true", "accelerator=cpu", "trainer.fast_dev_run=true", "logger=none"]
    assert command(monkeypatch, *words, "trainer.enable_progress_bar=false") == ""
    told = capsys.readouterr().out
    assert "\nstrategy:\n  _target_: evener.strategies.SingleDeviceStrategy\n" in told
    assert "${" not in told
