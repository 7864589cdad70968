"""Modules of libraries that depend on either name of Lightning train unchanged, and as their own Trainer trains them.

Each library wants an environment of its own: `pip install torch==2.13.0 LIBRARY -e ".[test]"`.
"""

import importlib
from typing import NoReturn

import pytest
from libraries import STRATEGIES, Trained, train, train_with, verdict
from library_cases import CASES

PART_OF_ITS_OWN = "a parameter of a part outside of the part's forward"
UNCUT = "can't be cut into chunks"
REFUSED = {
    ("chemprop", "dp"): UNCUT,
    ("chemprop", "balanced_dp"): UNCUT,
    ("chemprop", "fsdp"): PART_OF_ITS_OWN,
    ("nequip", "dp"): UNCUT,
    ("nequip", "balanced_dp"): UNCUT,
    ("nequip", "ddp"): "The loss is the value of a metric",
    ("nequip", "fsdp"): "torch.autograd.grad was given a parameter",
    ("rl4co", "fsdp"): PART_OF_ITS_OWN,
    ("schnetpack", "dp"): UNCUT,
    ("schnetpack", "balanced_dp"): UNCUT,
    ("schnetpack", "ddp"): "differs from one device",
    ("schnetpack", "fsdp"): "torch.autograd.grad was given a parameter",
    ("anomalib", "ddp"): "Pass batch_size= to self.log",
    ("anomalib", "fsdp"): "Pass batch_size= to self.log",
}
"""What the refusal says of libraries that can't train by a strategy, before the first step; see docs/migrating.md."""

BY_BATCHES = {"pytorch_forecasting": "val_RMSE", "terratorch": "val/Boundary_mIoU"}
"""A value that the library computes by the batches it is given, so that it depends on how they are cut."""

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


@pytest.fixture(scope="module")
def expected(library: str) -> Trained:
    return train(library, "lightning")


def comparable(trained: Trained, library: str) -> Trained:
    left_out = BY_BATCHES.get(library)
    return trained._replace(metrics={key: value for key, value in trained.metrics.items() if key != left_out})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_our_trainer_trains_as_the_librarys_lightning_does(library: str, expected: Trained, strategy: str) -> None:
    assert not expected.error
    found = verdict(comparable(train_with(library, strategy), library), comparable(expected, library))
    reason = REFUSED.get((library, strategy))
    assert found == "equal" if reason is None else found.startswith("refused: ") and reason in found, found
