"""Values that no option can have are refused before anything is built, in one sentence that says what is allowed."""

import errno
from pathlib import Path
from typing import Any, get_args

import pytest
import pytorch_lightning as pl
from omegaconf import OmegaConf

from evener.strategies import ConfigError, DDPStrategy
from evener.strategies.core.devices import resolve_devices
from evener.strategies.pipeline.stages import StageOptions
from evener.trainer.checkpoint._callback import Checkpoint
from evener.trainer.cli.train import compose, prepare, train
from evener.trainer.config.checks import annotations, instantiate, verify_config, verify_nested, verify_options
from evener.trainer.config.composing import ROOT
from evener.trainer.job.log_file import error_sentence
from evener.trainer.launch.launcher import launch

MISTAKES = [
    ("trainer.deterministic=perhaps", r"deterministic=perhaps is not allowed\. Give true, false, warn or null\."),
    ("+trainer.strategy=ddp", r"trainer\.strategy would be ignored.* Use strategy=<name>\."),
    ("name=../up", r"name='\.\./up' must be a relative path within log_dir"),
    ("name=null", r"name=null is not allowed\. Give text\."),
    ("run_dir=''", r"run_dir is empty\. Give the path of a directory\."),
    ("data.batch_size=auto", r"auto is no longer there\. Give a number; mode=plan .* finds the largest\."),
    ("compare.options=3", r"compare\.options=3 is not allowed\. Give a mapping\."),
    ("module.lr=fast", r"module\.lr=fast is not allowed\. Give a number"),
    (
        "strategy=ddp_model_parallel +strategy.num_microbatch=2",
        r"num_microbatch is not an option .*Did you mean strategy.num_microbatches\?",
    ),
    ("trainer.max_epochs=true", r"max_epochs=true is not allowed\. Give a whole number"),
    ("strategy=ddp strategy.bucket_cap_mb=0", r"bucket_cap_mb=0 is not allowed\. Give a number > 0 or null\."),
]


@pytest.mark.parametrize(("override", "sentence"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_value_that_is_not_allowed_is_refused_with_what_is(override: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        prepare(compose([*override.split(), *([] if override.startswith("run_dir") else [f"run_dir={tmp_path}"])]))


ALLOWED = [
    "trainer.max_steps=2e3", "trainer.max_time=00:01:00:00", "trainer.deterministic=warn", "precision=16", "seed=null",
    "trainer.detect_nonfinite=off", "trainer.val_check_interval=0.25", "monitor=null",
    "trainer.profiler=simple", "name=7", "devices=-1",
]  # fmt: skip


def test_what_is_allowed_passes_and_a_name_of_digits_is_text_and_all_devices_are_auto(tmp_path: Path) -> None:
    cfg = prepare(compose([*ALLOWED, f"run_dir={tmp_path}"]))
    assert (cfg.name, cfg.devices, cfg.trainer.devices) == ("7", "auto", "auto")
    assert prepare(compose(["name=a/b c", f"run_dir={tmp_path}"])).name == "a/b c"


class Theirs(pl.LightningModule):
    """A module of a user, whose annotation is not meant strictly."""

    def __init__(self, width: int = "wide") -> None:  # type: ignore[assignment]
        super().__init__()


def test_what_others_annotate_is_theirs() -> None:
    verify_options("module", {"width": "wider"}, Theirs)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DDPStrategy(bucket_cap_mb=0), r"ddp: bucket_cap_mb=0 is not allowed\. Give a number > 0 or null\."),
        (lambda: StageOptions(partition=3), r"partition=3 is not allowed\. Give auto or a .*names the first"),
        (lambda: Checkpoint(every_n_steps=0), r"Checkpoint: every_n_steps=0 is not allowed\. Give a whole"),
        (lambda: resolve_devices(None), r"devices must be a count, a list or 'auto'; got None"),
    ],
)
def test_options_are_refused_from_python_too(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_several_machines_and_a_directory_are_refused_where_one_process_and_a_file_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_nodes must be 1 for a strategy of one process; got num_nodes=2"):
        launch(prepare(compose(["num_nodes=2", f"run_dir={tmp_path}"])))
    with pytest.raises(ConfigError, match=r"is a directory\. Give a file in it, such as last\.ckpt, or resume=last"):
        prepare(compose([f"resume={tmp_path}", f"run_dir={tmp_path}"]))


def test_what_python_passes_by_mistake_is_told() -> None:
    given: Any = "strategy=ddp"
    with pytest.raises(ConfigError, match=r"Use compose\(\['strategy=ddp'\]\)"):
        compose(given)
    for wrong in (given, None, OmegaConf.create({})):
        with pytest.raises(ConfigError, match=r"expected a configuration, got .* Use train\(compose\(\[\.\.\.\]\)\)"):
            train(wrong)


def test_a_full_disk_is_one_sentence() -> None:
    told = error_sentence(OSError(errno.ENOSPC, "No space left on device"))
    assert told.startswith("The disk is full (No space left on device); existing checkpoints are intact. Free some")


def test_precisions_that_are_allowed_before_torch_is_imported_are_lightnings() -> None:
    def words(hint: Any) -> set[Any]:
        return set().union(*map(words, get_args(hint))) or {hint}

    lightnings = words(annotations(pl.Trainer)["precision"][0])
    assert words(ROOT["precision"]) - {None} == lightnings - {type(None)}


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "torch.load", "pathlib.Path"])
def test_functions_and_pythons_own_classes_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"module\.parts\.0\._target_={target} is refused"):
        verify_nested("", {"module": {"parts": [{"_target_": target}]}})
    verify_nested("module", {"optimizer": {"_target_": "torch.optim.AdamW", "_partial_": True}})


@pytest.mark.parametrize("override", ["module", "data", "checkpoint", "logger.tensorboard", "strategy"])
def test_another_kind_is_refused_with_the_kind_expected(override: str) -> None:
    kind = {"data": "LightningDataModule", "checkpoint": "Callback", "logger.tensorboard": "Logger"}.get(override, "")
    with pytest.raises(ConfigError, match=f"must be an? pytorch_lightning {kind}"):
        verify_config(compose([f"{override}._target_=torch.nn.Linear", "run_dir=unused"]))


@pytest.mark.parametrize(
    "more", [{"denominator": 0.5}, {"more": 1}, {"numerator": {"_target_": "builtins.int", "_args_": ["x"]}}]
)
def test_what_a_constructor_refuses_names_the_group_and_its_other_errors_stay(more: dict[str, Any]) -> None:
    given = {"_target_": "fractions.Fraction", "numerator": 3, "denominator": 4}
    with pytest.raises(ConfigError, match=r"module: fractions\.Fraction refused its options"):
        instantiate("module", OmegaConf.create({**given, **more}))
    with pytest.raises(ZeroDivisionError):
        instantiate("module", OmegaConf.create({**given, "denominator": 0}))
