"""What launched runs train in tests: a tiny module that tells what it does, and misbehaves where it is told to."""

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evener.trainer.launch import launcher


class Told(pl.LightningModule):
    """Appends `<rank> <pid> <step>` to a file in every step.

    Args:
        record: the file.
        pause_s: seconds that a step takes.
        fault: what rank 1 does at step 3: raise, exit, exit_well, interrupt, kill, abort, hang, or nothing;
            `late`: rank 1 is asked to stop (SIGTERM) after the last step, and `at_end` (SIGINT) when its process ends.
        once: a file that exists once the fault has happened, after which it does not happen again.
    """

    def __init__(self, record: str, pause_s: float = 0.0, fault: str = "", once: str = "", **_: Any) -> None:
        super().__init__()
        interrupt_command("while modules are built")
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))  # two stages, at most
        self.record = record
        self.pause_s = pause_s
        self.fault = fault
        self.once = once

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with open(self.record, "a") as file:
            file.write(f"{self.global_rank} {os.getpid()} {self.trainer.global_step}\n")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        time.sleep(self.pause_s)
        if self.global_rank == 1 and step == 3 and not (self.once and os.path.exists(self.once)):
            self.misbehave()
        loss = self.layer(batch[0]).square().mean()
        self.log("val/loss", loss.detach())
        return loss

    def misbehave(self) -> None:
        if self.once:
            Path(self.once).touch()
        if self.fault == "raise":
            raise KeyError("rank 1 had enough")
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        faults: dict[str, Callable[[], Any]] = {
            "exit": lambda: sys.exit("rank 1 has seen enough"), "exit_well": sys.exit, "abort": os.abort,
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "hang": lambda: time.sleep(600),
        }  # fmt: skip
        faults.get(self.fault, lambda: None)()

    def on_train_end(self) -> None:
        if self.fault == "late" and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fault == "at_end" and self.global_rank == 1:
            Finalize(None, os.kill, (os.getpid(), signal.SIGINT), exitpriority=0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        Path(self.record).with_name("tested").touch()

    def test_dataloader(self) -> Any:
        return self.train_dataloader()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(256.0).reshape(128, 2) / 256), 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Raises(Told):
    """Fails on every rank at step 3."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3:
            raise KeyError(f"rank {self.global_rank} had enough")
        return super().training_step(batch, batch_idx)


class Odd(Told):
    """Rank 0 misbehaves in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 0:
            self.misbehave()
        return super().training_step(batch, batch_idx)

    def misbehave(self) -> None:
        if self.fault == "Ctrl-C":
            atexit.register(os.kill, os.getpid(), signal.SIGINT)
        if self.fault == "GeneratorExit":
            raise GeneratorExit("enough")
        if self.fault.startswith("exit"):
            sys.exit({"exit 3": 3, "exit 0": 0, "exit text": "seen enough"}[self.fault])
        if self.fault == "StopIteration":
            next(iter([]))


class FailsEarly(Told):
    """Rank 1 fails before training, once, while rank 0 waits for something, and ends in order where it is asked to."""

    def on_fit_start(self) -> None:
        if not Path(self.once).exists():
            if self.global_rank == 1:
                self.misbehave()
            time.sleep(60)


class Diverges(Told):
    """Every loss is nan."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * float("nan")
        self.log("val/loss", loss.detach())
        return loss


class Silent(Told):
    """Forgets to return its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


def interrupt_command(place: str) -> None:
    """Send SIGINT to the process that has started this one, where the environment says so."""
    if os.environ.get("INTERRUPTED") == place:
        os.kill(os.getppid(), signal.SIGINT)


os.register_at_fork(after_in_child=lambda: interrupt_command("while ranks start"))


def interrupt_before_log() -> None:
    """Have a forked rank interrupt the command when it has begun, and has no log yet."""
    if os.environ.get("INTERRUPTED") == "while ranks begin":
        make_run = launcher.Run

        def wait(*args: Any) -> Any:
            interrupt_command("while ranks begin")
            time.sleep(2)
            return make_run(*args)

        vars(launcher)["Run"] = wait


os.register_at_fork(after_in_child=interrupt_before_log)


class HangingSamples(Dataset[Tensor]):
    """The data worker of rank 1 hangs at its fourth sample, and leaves its process id in a file."""

    def __init__(self, record: str) -> None:
        self.pid = Path(record + ".worker")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if index == 7:  # rank 1 has the odd ones
            self.pid.write_text(str(os.getpid()))
            time.sleep(600)
        return torch.ones(2)


class Hangs(Told):
    """Has a data worker that hangs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch], batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(HangingSamples(self.record), 1, num_workers=1)


class Numbered(pl.LightningModule):
    """Trains on numbered samples in a drawn order, and appends `<attempt> <pid> <epoch> <batch> <samples>` to a file.

    Args:
        record: the file; the weights are saved beside it at the end.
        gate: a file with the number of the last global batch to be trained on; later ones begin, and wait until it
            allows them, or until the rank is asked to stop.
    """

    NUM_SAMPLES = 18 * 9 + 3

    def __init__(self, record: str, gate: str = "", **_: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.record = record
        self.gate = Path(gate) if gate else None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with open(self.record, "a") as file:
            attempt = os.environ.get("MASTER_PORT", "0")  # of each attempt's own store
            file.write(f"{attempt} {os.getpid()} {self.current_epoch} {batch_idx} {json.dumps(self.own(batch))}\n")
        number = self.current_epoch * len(self.trainer.train_dataloader) + batch_idx
        while self.gate is not None and int(self.gate.read_text()) < number and not self.is_asked_to_stop():
            time.sleep(0.05)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, ids = batch
        loss = (self.layer(x) - ids[:, None] / 100).square().mean()
        self.log("val/loss", loss.detach(), sync_dist=True, batch_size=len(self.own(batch)))
        return loss

    def own(self, batch: Any) -> list[int]:
        """The samples that count."""
        shares = getattr(getattr(self.trainer.strategy, "contract", None), "shares", None)
        return batch[1].tolist() if shares is None or shares.counts else []

    def is_asked_to_stop(self) -> bool:
        strategy: Any = self.trainer.strategy
        return strategy.group.stopping.signal is not None

    def on_train_end(self) -> None:
        state = self.layer.state_dict()
        weights = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
        if self.global_rank == 0:
            torch.save(weights, self.record + ".weights")

    def train_dataloader(self) -> Any:
        numbers = torch.arange(self.NUM_SAMPLES)
        x = torch.stack([numbers.double().sin(), numbers.double().cos()], 1)
        return DataLoader(TensorDataset(x, numbers), 18, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)
