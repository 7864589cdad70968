"""What every test shares: one intra-op thread, whatever the machine's cores, and the marker `fast`."""

import gc

gc.disable()  # until all tests are imported, which makes no garbage

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

NEEDS_NEWER = "strategy=fsdp needs torch 2.13"
HAS_FSDP = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "long")):
            item.add_marker("fast")
        if not HAS_FSDP and (item.get_closest_marker("fsdp") or "fsdp" in item.nodeid):
            item.add_marker(pytest.mark.skip(reason=NEEDS_NEWER))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
