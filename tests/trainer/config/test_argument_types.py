"""What a type checker knows of the Trainer's arguments is what it takes, and it finds misspelt ones."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import pytorch_lightning as pl

from evener.trainer import Trainer

ROOT = Path(__file__).parents[3]
MISSPELT = """
from evener.strategies import DDPStrategy
from evener.trainer import Trainer

Trainer(max_epochs=3, strategy=DDPStrategy(batch_size_is="global", find_unused_parameters=True))
Trainer(max_epoch=3)
"""


def test_typed_names_are_those_of_lightnings_trainer_and_ours() -> None:
    typed = get_type_hints(sys.modules[Trainer.__module__].TrainerArguments)
    assert set(typed) == set(inspect.signature(pl.Trainer.__init__).parameters) - {"self", "strategy"}


@pytest.mark.slow
def test_a_type_checker_finds_misspelt_arguments(tmp_path: Path) -> None:
    (tmp_path / "misspelt.py").write_text(MISSPELT)
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    assert checker is not None
    done = subprocess.run(
        [checker, "--pythonpath", sys.executable, "--level", "error", "misspelt.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if "No parameter named" in line]
    assert [line.split('"')[1] for line in found] == ["max_epoch"]
