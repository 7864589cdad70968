"""However a run ends, the command says why in a sentence, with the right status, in `train.log` and `result.json`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm_python

ROOT = Path(__file__).parents[3]

MODULE = """
import atexit, itertools, os, signal, sys
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Odd(pl.LightningModule):
    def __init__(self, fault="", **_):
        super().__init__()
        self.layer, self.fault = torch.nn.Linear(2, 1), fault

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            self.misbehave()
        return self.layer(batch[0]).mean()

    def misbehave(self):
        if self.fault == "Ctrl-C":
            atexit.register(os.kill, os.getpid(), signal.SIGINT)
        if self.fault == "GeneratorExit":
            raise GeneratorExit("enough")
        if self.fault.startswith("exit"):
            sys.exit({"exit 3": 3, "exit 0": 0, "exit text": "seen enough"}[self.fault])
        if self.fault == "StopIteration":
            next(iter([]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), 2)
"""


def command(folder: Path, *words: str) -> list[str | Path]:
    (folder / "odd.py").write_text(MODULE)
    return [
        ROOT / "train.py", "strategy=single_device", "devices=1", "accelerator=cpu", f"log_dir={folder}/logs",
        "data=none", "module._target_=odd.Odd", "logger=none", "callbacks=none", "trainer.max_epochs=1",
        "checkpoint=last", "monitor=null", "test_after_fit=false", *words,
    ]  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, *words: str) -> Any:
    return warm_python.run(*command(folder, *words), env=environment(folder), cwd=folder)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("GeneratorExit", 1, "GeneratorExit: enough"),
        ("exit 3", 3, "SystemExit: 3"),
        ("exit 0", 1, "SystemExit: 0"),
        ("exit text", 1, "SystemExit: seen enough"),
        ("StopIteration", 1, "RuntimeError: training_step raised StopIteration, which would end the epoch without a "
         "word. Give next() a default, or begin the iterator again."),
    ],
)  # fmt: skip
def test_what_ends_a_step_is_told_with_the_users_frames(
    fault: str, status: int, reason: str, ranks: int, tmp_path: Path
) -> None:
    done = run(tmp_path, f"+module.fault={fault}", *(["strategy=ddp", "devices=2"] if ranks > 1 else []))
    assert done.returncode == status, done.stderr
    assert "in misbehave" in done.stderr
    assert "frames of libraries are left out" in done.stderr
    assert "site-packages" not in done.stderr
    assert "During handling" not in done.stderr
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["reason"] == reason
    (log,) = tmp_path.rglob("train.log")
    assert "rank 0 failed: " in log.read_text()


def test_a_ctrl_c_while_python_itself_ends_leaves_no_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "+module.fault=Ctrl-C")
    assert "run directory" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_damaged_configuration_of_an_earlier_run_is_named(tmp_path: Path) -> None:
    for folder in ("checkpoints", ".hydra"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    (checkpoint := tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "run" / ".hydra" / "config.yaml").write_bytes(b"\xff\xfe")
    done = run(tmp_path, "config=run", f"resume={checkpoint}")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: config=run: ")
    assert ".hydra/config.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_frames_are_shown_on_request(tmp_path: Path) -> None:
    words = command(tmp_path, "+module.fault=exit 3")
    done = warm_python.run(*words, env={**environment(tmp_path), "HYDRA_FULL_ERROR": "1"}, cwd=tmp_path)
    assert "in misbehave" in done.stderr
    assert "site-packages" in done.stderr
