"""Modules of libraries that depend on either name of Lightning train unchanged, and as their own Trainer trains them.

Each library wants an environment of its own: `pip install torch==2.13.0 LIBRARY -e ".[test]"`.
"""

import importlib

import pytest
from libraries import STRATEGIES, Trained, train, train_with, verdict
from library_cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=CASES)
def library(request: pytest.FixtureRequest) -> str:
    try:
        importlib.import_module(request.param)
    except Exception as exc:  # noqa: BLE001  # whatever a library raises that does not fit the environment
        pytest.skip(
            f"{request.param} is not there ({type(exc).__name__}: {exc}); install it in an environment of its own"
        )
    return request.param


@pytest.fixture(scope="module")
def expected(library: str) -> Trained:
    return train(library, "lightning")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_our_trainer_trains_as_the_librarys_lightning_does(library: str, expected: Trained, strategy: str) -> None:
    assert not expected.error
    assert verdict(train_with(library, strategy), expected) == "equal"
