"""Test the project: `pytest` in this folder trains for one epoch."""

from pathlib import Path

import torch
from spirals import SpiralClassifier

from evener.trainer import compose, train

CONF = Path(__file__).parent / "conf"


def test_a_score_per_arm() -> None:
    assert SpiralClassifier()(torch.zeros(5, 2)).shape == (5, 3)


def test_an_epoch_trains(tmp_path: Path) -> None:
    short = ["trainer.max_epochs=1", "accelerator=cpu", f"log_dir={tmp_path}"]
    result = train(compose(short, config_name="project", config_dir=CONF))
    assert result.metrics["val/loss"] < 1.1  # log(3), the loss of guessing
