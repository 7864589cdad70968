"""What every test shares: one intra-op thread, so that results do not depend on the machine's cores."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
