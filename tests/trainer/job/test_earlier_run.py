"""What `resume=last` starts from."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from evener.strategies import ConfigError
from evener.trainer.checkpoint.checkpoint_io import VerifiedCheckpointIO
from evener.trainer.job.earlier_run import checkpoint_of_name


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_the_newest_checkpoint_is_taken_unless_its_run_has_diverged(value: float, tmp_path: Path) -> None:
    # a run went on from weights of nan, and said nothing
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    weights = {"layer.weight": torch.tensor([0.0, value]), "steps": torch.tensor(3)}
    VerifiedCheckpointIO().save_checkpoint({"state_dict": weights}, path)
    cfg = OmegaConf.create({"log_dir": str(tmp_path.parent), "name": tmp_path.name, "resume": "last"})
    if value == 1.0:
        assert checkpoint_of_name(cfg) == path
        return
    with pytest.raises(
        ConfigError, match=r"last.ckpt is of a run that diverged: layer.weight contains nan or infinity"
    ):
        checkpoint_of_name(cfg)
