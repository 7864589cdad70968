"""Other people's models, and metrics of theirs in a module of ours, judged as the cases of `tests/acceptance` are.

Two verdicts are allowed: stock Lightning's training on one device, to 1e-10 in float64, or refused in one sentence
before the first optimizer step.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "zoo"), str(TESTS / "libraries"), str(TESTS)]

from acceptance import case, judge  # noqa: E402  # found by the line above

TOLERANCE = 1e-10
STRATEGIES = [judge.STOCK, "dp", "balanced_dp", "ddp", "model_parallel"]
"""The first shows that one device of ours trains as stock Lightning does."""
HOLDS = ("equal", "refused")


class Case(case.Case):
    """A module, the loaders that it trains and validates on, and the difference that is allowed.

    The tolerance is absolute and relative, and wider where a library computes in float32. Values whose names begin with
    one of `differs` are not compared: those that a library computes by the batches it is given.
    """

    tolerance: float

    def __init__(
        self, name: str, module: Callable[[], Any], loaders: Callable[[], Any], tolerance: float = TOLERANCE,
        differs: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(name, "zoo", module, loaders, "exact", False, differs, list, True, {})
        object.__setattr__(self, "tolerance", tolerance)


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
    seen = judge.observe(*job)
    for logged in ("logged", "callback_metrics", "logged_metrics"):
        values = seen.values.get(logged, {})
        for name in [name for name in values if name.startswith(CASES[job[0]].differs)]:
            del values[name]
    seen.values = numbers(seen.values)
    return seen


def numbers(value: Any) -> Any:
    """Values as tensors in which a number stands for nan, since a metric may be that on one device, too."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    return torch.as_tensor(value).double().nan_to_num(nan=1e30)


class Zoo(judge.Judge):
    """Verdicts of many cases, each trained on one device once."""

    def __init__(self) -> None:
        super().__init__()
        for group in self.groups.values():
            group.function = observe

    def reference(self, *args: Any, **kwargs: Any) -> judge.Seen:
        seen = super().reference(*args, **kwargs)
        seen.own |= {name for name in seen.values["logged"] if name.endswith("_step")}  # of evaluations, too
        return seen

    def of(self, name: str, plan_name: str) -> judge.Verdict:
        """The verdict of a case under a strategy."""
        allowed = CASES[name].tolerance
        patched = {"all_cases": lambda: CASES, "verify_sound": lambda *_: None}
        with mock.patch.multiple(judge, **patched, RELATIVE=allowed, ABSOLUTE=allowed):
            return self.verdict(CASES[name], plan_name)

    def check(self, name: str, plan_name: str) -> None:
        """Fail unless law 1 holds; skip what stock Lightning does not run either."""
        verdict = self.of(name, plan_name)
        if verdict.word == "unsound":
            pytest.skip(verdict.detail)
        assert verdict.word in HOLDS, f"{name} under {plan_name}: {verdict}"


@functools.cache
def needs(*packages: str) -> None:
    """Skip the test where a package is missing, with the reason."""
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as exc:  # noqa: BLE001  # compiled parts that do not load raise anything
            pytest.skip(f'{package} is not there ({type(exc).__name__}: {exc}); pip install -e ".[zoo]"')
