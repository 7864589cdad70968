"""What a type checker knows of keyword arguments is what the constructors take, and it finds misspelt ones."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import pytorch_lightning as pl

from evener.strategies import STRATEGIES
from evener.trainer import Trainer

ROOT = Path(__file__).parents[3]
MISSPELT = """
from evener.strategies import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPStrategy, ModelParallelStrategy
from evener.trainer import Trainer

Trainer(max_epochs=3, strategy=DDPStrategy(timeout_s=60, find_unused_parameters=True))
BalancedDDPStrategy(weights=[1, 2], shard_optimizer=True)
ModelParallelStrategy(num_microbatches=2)
Trainer(max_epoch=3)
BalancedDataParallelStrategy(weigths=[1, 2])
BalancedDDPStrategy(weigths=[1, 2])
DDPStrategy(timeout=60)
ModelParallelStrategy(num_microbatch=2)
"""


def names_of(cls: type) -> set[str]:
    """The keyword arguments that a type checker knows."""
    init: Any = inspect.unwrap(cls.__init__)
    own = {name for name, p in inspect.signature(init).parameters.items() if p.kind is not p.VAR_KEYWORD}
    further: Any = get_type_hints(init).get("options") or get_type_hints(init).get("kwargs")
    arguments = further.__args__[0] if hasattr(further, "__args__") else None
    return (own | set(get_type_hints(arguments) if arguments else ())) - {"self"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_typed_names_are_those_that_a_strategy_takes(name: str) -> None:
    taken: set[str] = set()
    for cls in STRATEGIES[name].__mro__:
        init: Any = inspect.unwrap(vars(cls).get("__init__") or int)
        if not cls.__module__.startswith("evener."):
            break
        if "__init__" in vars(cls):
            kinds = {name: p.kind for name, p in inspect.signature(init).parameters.items()}
            further = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]
            taken |= set(kinds) - {"self", *further}
            if not further:
                break
            taken |= set(vars(cls).get("further_options", {}))
    if "model_parallel_size" in taken:
        taken.discard("devices_per_process")  # of stages they are the same
    if name not in ("ddp", "fsdp"):
        taken.discard("global_view")  # which refuses other strategies
    assert names_of(STRATEGIES[name]) == taken


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
    assert [line.split('"')[1] for line in found] == ["max_epoch", "weigths", "weigths", "timeout", "num_microbatch"]
