"""What every test shares: one intra-op thread, whatever the machine's cores, and the marker `fast`."""

import gc

gc.disable()  # until all tests are imported, which makes no garbage

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "long")):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
