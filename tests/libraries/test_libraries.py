"""Modules of libraries that depend on either name of Lightning train unchanged, and as stock Lightning trains them.

Each library wants an environment of its own: `pip install torch==2.13.0 LIBRARY -e ".[test]"`.
"""

import importlib
from typing import NoReturn

import pytest
from library_cases import CASES
from zoo import STRATEGIES, Zoo, lent_zoo  # noqa: F401  # before any library: what imports `lightning` finds evener's

REFUSED = {
    "chemprop": ("dp", "balanced_dp", "fsdp"), "nequip": ("dp", "balanced_dp", "ddp", "fsdp"), "rl4co": ("fsdp",),
    "schnetpack": ("dp", "balanced_dp", "ddp", "fsdp"), "anomalib": ("ddp", "fsdp"),
}  # fmt: skip
"""Strategies by which libraries may be refused, before the first step; see docs/migrating.md."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=CASES)
def library(request: pytest.FixtureRequest) -> str:
    try:
        importlib.import_module(request.param)
    except Exception as exc:  # noqa: BLE001  # whatever a library raises that does not fit the environment
        skip(request.param, exc)
    try:
        CASES[request.param]()
    except (ImportError, OSError) as exc:  # a part of it, or a library of another
        skip(request.param, exc)
    return request.param


def skip(library: str, exc: Exception) -> NoReturn:
    pytest.skip(f"{library} is not there ({type(exc).__name__}: {exc}); install it in an environment of its own")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp"])
def test_our_trainer_trains_as_stock_lightning_does(library: str, strategy: str, zoo: Zoo) -> None:
    verdict = zoo.of(library, strategy)
    assert verdict.word == "equal" or (verdict.word == "refused" and strategy in REFUSED.get(library, ())), verdict
