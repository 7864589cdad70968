"""Other people's models, and metrics of theirs in a module of ours, judged as the cases of `tests/acceptance` are.

Two verdicts are allowed: stock Lightning's training on one device, to 1e-10 in float64, or refused in one sentence
before the first optimizer step.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "zoo"), str(TESTS / "libraries"), str(TESTS)]

from acceptance import judge  # noqa: E402  # found by the line above
from acceptance.case import Case  # noqa: E402  # as above

TOLERANCE, NUM_SAMPLES = 1e-10, 11
STRATEGIES = [judge.STOCK, "dp", "balanced_dp", "ddp", "model_parallel"]
"""The first shows that one device of ours trains as stock Lightning does."""


class Cases(dict[str, Case]):
    """Cases by name, each made when it is asked for: models need their packages."""

    def __missing__(self, name: str) -> Case:
        models, libraries, metrics = (importlib.import_module(f"{one}_cases") for one in ("model", "library", "metric"))
        self[name] = next((one for one in (models, libraries) if name in one.CASES), metrics).case(name)
        return self[name]


CASES = Cases()


def observe(*job: Any) -> judge.Seen:
    """Train a case; runs in processes of the judge."""
    judge.all_cases = lambda: CASES  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return judge.observe(*job)


class Zoo(judge.Judge):
    """Verdicts of many cases, each trained on one device once."""

    observe, verify_sound = staticmethod(observe), staticmethod(lambda *_: None)

    def reference(self, *args: Any, **kwargs: Any) -> judge.Seen:
        seen = super().reference(*args, **kwargs)
        seen.own |= {name for name in seen.values["logged"] if name.endswith("_step")}  # of evaluations, too
        return seen

    def of(self, name: str, plan_name: str) -> judge.Verdict:
        """The verdict of a case under a strategy."""
        return self.verdict(CASES[name], plan_name)


@pytest.fixture(scope="module", name="zoo")
def lent_zoo() -> Iterator[Zoo]:
    found = Zoo()
    yield found
    found.pool.restart()


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def needs(*packages: str) -> None:
    """Skip the test where a package is missing, with the reason."""
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as exc:  # noqa: BLE001  # compiled parts that do not load raise anything
            pytest.skip(f'{package} is not there ({type(exc).__name__}: {exc}); pip install -e ".[zoo]"')
