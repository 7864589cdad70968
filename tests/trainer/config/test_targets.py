"""What a configuration may name as `_target_`."""

from typing import Any

import pytest
import pytorch_lightning as pl

from evener.strategies import ConfigError
from evener.trainer.cli.train import compose
from evener.trainer.config.checks import verify_config, verify_nested


@pytest.mark.parametrize(
    "target", ["os.system", "subprocess.Popen", "builtins.eval", "torch.load", "torch.hub.load", "pathlib.Path"]
)
def test_functions_and_pythons_own_classes_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"module\.parts\.0\._target_={target} is refused"):
        verify_nested("", {"module": {"parts": [{"_target_": target}]}})


def test_classes_of_packages_pass() -> None:
    verify_nested("module", {"optimizer": {"_target_": "torch.optim.AdamW", "_partial_": True}})


def test_a_name_that_does_not_import_is_told() -> None:
    with pytest.raises(ConfigError, match=r"module\.a\._target_=torch\.optim\.Adamm can't be imported"):
        verify_nested("module", {"a": {"_target_": "torch.optim.Adamm"}})


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("module._target_=torch.nn.Linear", "LightningModule"),
        ("data._target_=evener.trainer.checkpoint.Checkpoint", "LightningDataModule"),
        ("checkpoint._target_=torch.nn.Linear", "Callback"),
        ("logger.tensorboard._target_=torch.nn.Linear", "Logger"),
        ("strategy._target_=torch.nn.Linear", "Strategy"),
    ],
)
def test_another_kind_is_refused_with_the_kind_expected(override: str, kind: str) -> None:
    cfg: Any = compose([override, "run_dir=unused"])
    with pytest.raises(ConfigError, match=f"must be an? pytorch_lightning {kind}"):
        verify_config(cfg)


class Near(pl.LightningModule):
    """Stands beside a type alias, which Python 3.10 takes for a class: looking for a close name ended in TypeError."""


Batch = list[int]


def test_type_aliases_are_no_classes() -> None:
    cfg: Any = compose(["module._target_=test_targets.Neat", "run_dir=unused"])
    with pytest.raises(ConfigError, match=r"Did you mean test_targets\.Near\?"):
        verify_config(cfg)
    cfg = compose(["module._target_=test_targets.Batch", "run_dir=unused"])
    with pytest.raises(ConfigError, match="must be a pytorch_lightning LightningModule; got a GenericAlias"):
        verify_config(cfg)
