"""A plain script, not guarded by `__main__`: what stands in it runs once, and after fit it has the trained weights."""

import atexit
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
import tiny
import torch
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import DDPStrategy
from evener.trainer import Trainer


def list_threads() -> None:
    """Write the names of this process's threads, those of C++ too, beside the log."""
    names = list[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ends meanwhile
            names.append((task / "comm").read_text().strip())
    Path(f"{sys.argv[1]}.threads{os.environ.get('RANK', '')}").write_text("\n".join(names))


if "threads" in sys.argv:
    atexit.register(list_threads)  # the first is the last to run
warnings.simplefilter("ignore")
with open(sys.argv[1], "a") as file:
    file.write("before\n")


class Line(tiny.Line):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if "fail" in sys.argv and self.global_rank == 1:
            raise ValueError("rank 1 of a script")
        if self.global_rank == 1 and self.trainer.global_step == 2 and {"interrupt", "exit"} & set(sys.argv):
            raise KeyboardInterrupt if "interrupt" in sys.argv else SystemExit(7)
        if "hang" in sys.argv and torch.distributed.get_rank() == 1:
            time.sleep(600)
        if "freeze0" in sys.argv and self.global_rank == 0 and self.trainer.global_step == 3:
            time.sleep(1)  # so that its heartbeat says where it is
            os.kill(os.getpid(), signal.SIGSTOP)
        if "busy" in sys.argv and self.trainer.global_step == 5:
            time.sleep(600) if self.global_rank == 0 else os.kill(os.getpid(), signal.SIGKILL)
        if "orphan" in sys.argv and self.global_rank == 1 and self.trainer.global_step == 3:
            if child := os.fork():
                Path(f"{sys.argv[1]}.child").write_text(str(child))
                os.kill(os.getpid(), signal.SIGKILL)
            os.closerange(0, 3)  # the script's outputs; it keeps what else a rank has, as a data worker does
            time.sleep(100)
            os._exit(0)
        if "long" in sys.argv and self.trainer.global_step == 20:
            Path(f"{sys.argv[1]}.rank{self.global_rank}").write_text(str(os.getpid()))
        return self.loss(batch)

    def on_train_end(self) -> None:
        if "linger" in sys.argv and self.global_rank == 1:
            time.sleep(600)

    def on_fit_end(self) -> None:
        if "tarry" in sys.argv and self.global_rank == 1:
            time.sleep(600)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test", self.loss(batch))


torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)  # the parent's threads are in use
loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 32)[:, None]), 4)
module = Line()


class TellStop(pl.Callback):
    """What a user may do when a run stops: every rank is here, at the same step."""

    def on_exception(self, trainer: pl.Trainer, *_: object) -> None:
        with open(f"{sys.argv[1]}.stopped", "a") as file:
            file.write(f"{os.getpid()} {trainer.global_step}\n")


BOUNDED = {"hang", "freeze0", "linger", "tarry"}


def make_trainer() -> Trainer:
    strategy = DDPStrategy(timeout_s=3 if BOUNDED & set(sys.argv) else 120)
    max_epochs = 10**6 if "long" in sys.argv else 20
    return tiny.quiet(strategy=strategy, devices=2, max_epochs=max_epochs, callbacks=[TellStop()])


trainer = make_trainer()
try:
    trainer.fit(module, loader)
finally:
    assert any(isinstance(callback, TellStop) for callback in trainer.callbacks)
trainer.test(module, loader, verbose=False)
make_trainer().fit(module, loader)
with open(sys.argv[1], "a") as file:
    file.write(f"after {os.getpid()} {module.layer.weight.item():.2f} {float(trainer.callback_metrics['test']):.4f}\n")
