"""Without lean steps Lightning's own loops run, and every strategy still trains as one device does."""

import re
from importlib.metadata import requires
from typing import Any

import pytest
import torch
from parity import CASES, PLANS, assert_equal, baseline, fit, make_module, run
from tiny import quiet

from evener.trainer import trainer as trainer_file
from evener.trainer.loops import step_plan
from evener.trainer.loops.train_step import TrainStep

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this file may take a lean step."""

    def fail(*args: Any) -> None:
        raise AssertionError("a lean step was taken")

    monkeypatch.setattr(TrainStep, "run", fail)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["ragged", "accumulation_with_a_short_tail", pytest.param("all", marks=SLOW)])
def test_training_without_lean_steps_equals_one_device(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_file, "is_tested", lambda *_: False)
    num_devices, strategy = PLANS[plan]
    for case in CASES.values() if name == "all" else [CASES[name]]:
        assert_equal(run(case, strategy(**case.strategy), devices=num_devices), baseline(case), case.tolerance)


def test_the_argument_decides() -> None:
    assert quiet().lean
    case = CASES["ragged"]
    assert not fit(case, make_module(case), "auto", devices=1, lean=False).lean


def test_an_untested_version_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    with pytest.warns(UserWarning, match=r"not tested with torch 2\.99\.1 \(tested: 2\."):
        assert not quiet().lean
    assert not quiet().lean  # a second warning would be an error here
    assert quiet(lean=True).lean


def test_every_version_that_can_be_installed_takes_lean_steps() -> None:
    (limits,) = [re.findall(r"[<>]=?[\d.]+", word) for word in requires("evener") or [] if re.match(r"torch\b", word)]
    (least,) = [int(limit.split(".")[1]) for limit in limits if limit.startswith(">=")]
    (beyond,) = [int(limit.split(".")[1]) for limit in limits if re.match(r"<\d", limit)]
    assert tuple(f"2.{minor}" for minor in range(least, beyond)) == step_plan.TESTED
