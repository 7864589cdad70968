"""Two ranks from a real notebook kernel: the fit works, and a rank that fails leaves the kernel usable."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install ipykernel")
from jupyter_client.manager import start_new_kernel

CELL_S = 300
"""Seconds that a cell may take; alone on two cores the longest, which imports torch, takes 4."""

IMPORTS = """
import warnings
warnings.simplefilter("ignore")
import lightning as L  # the other name: forked ranks know the module under both
from evener.trainer import Trainer
import torch
from torch.utils.data import DataLoader, TensorDataset
import pytorch_lightning
"""
MODULE = """
class Line(L.LightningModule):
    def __init__(self, fails=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fails = fails

    def training_step(self, batch, batch_idx):
        assert isinstance(self, pytorch_lightning.LightningModule)
        if self.fails and self.global_rank == 1:
            raise KeyError("rank 1 of a cell")
        return (self.layer(batch[0]) - 3 * batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)

def fit(module):
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 32)[:, None]), 4)
    trainer = Trainer(strategy="ddp", devices=2, accelerator="cpu", max_epochs=20, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, loader)
    return f"{module.layer.weight.item():.2f}"

torch.randn(600, 600) @ torch.randn(600, 600)  # the kernel's threads are in use
"""


@pytest.fixture
def kernel() -> Iterator[tuple[Callable[[str], Any], psutil.Process]]:
    """What runs a cell and returns its reply, with the value of the last line under `value`; and the process."""
    manager, client = start_new_kernel(kernel_name="python3")

    def run(cell: str) -> dict[str, Any]:
        said: list[dict[str, Any]] = []
        reply = client.execute_interactive(cell, timeout=CELL_S, output_hook=said.append)
        values = [message["content"]["data"] for message in said if message["msg_type"] == "execute_result"]
        return {**reply["content"], "value": values[0]["text/plain"] if values else None}

    process = psutil.Process(manager.provisioner.pid)
    yield run, process
    children = process.children(recursive=True)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    for child in children:
        child.kill()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*without encryption")
def test_a_notebook_fits_on_two_ranks_and_survives_one_that_fails(
    kernel: tuple[Callable[[str], Any], psutil.Process],
) -> None:
    run, process = kernel
    for cell in (IMPORTS, MODULE):
        assert run(cell)["status"] == "ok"
    assert run("fit(Line())")["value"] == "'3.00'"
    failed = run("fit(Line(fails=True))")
    assert failed["status"] == "error"
    assert "rank 1 of a cell" in failed["evalue"]
    assert process.children(recursive=True) == []
    assert run("fit(Line())")["value"] == "'3.00'"
