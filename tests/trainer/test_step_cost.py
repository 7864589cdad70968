"""What a step costs in Python: calls are counted, which no other work on the machine changes, instead of timed.

`benchmarks/step_overhead.py` has the times.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from tiny import Tiny, quiet
from torch import nn
from torch.utils.data import DataLoader, Dataset

from evener.trainer import Trainer

FEW, MANY = 20, 40


class Net(Tiny):
    """A small perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))


class Logs(Net):
    """A step as users write them: three values, one of them an epoch mean."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log("scaled", loss.detach() * 2)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss


class Counts(pl.Callback):
    """Counts samples in a batch hook."""

    num_samples = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_samples += len(batch[0])


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 8), torch.randint(2, (4,))) for _ in range(num)]


def loader(num_batches: int) -> DataLoader[Any]:
    return DataLoader(batches(num_batches), batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


def num_calls(run: Callable[[], Any]) -> int:
    """Calls of Python functions while something runs; calls into C are not counted."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # what a collection calls depends on what ran before
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_per_batch(run: Callable[[int], Any]) -> int:
    """Calls that one more batch costs, so that the start and the end of a run do not count."""
    for num_batches in (FEW, MANY):
        run(num_batches)  # whatever is imported, or kept from then on
    few, many = num_calls(lambda: run(FEW)), num_calls(lambda: run(MANY))
    return round((many - few) / (MANY - FEW))  # which thread copies the last snapshot is chance, and a few calls


def by_hand(num_batches: int) -> None:
    """The arithmetic of `Logs`, with its bookkeeping but for what happens only at log points."""
    module, total, num_samples = Net(), torch.zeros(()), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for inputs, targets in loader(num_batches):
        loss = nn.functional.cross_entropy(module.layer(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(inputs)
        num_samples += len(inputs)


def evaluated_by_hand(num_batches: int) -> None:
    module, total = Net().eval(), torch.zeros(())
    with torch.inference_mode():
        for inputs, targets in loader(num_batches):
            total += nn.functional.cross_entropy(module.layer(inputs), targets)


def fit_as_users_do(trainer: type[pl.Trainer], folder: Path, num_batches: int) -> None:
    home = tempfile.mkdtemp(dir=folder)
    callbacks = [Counts(), LearningRateMonitor(), ModelCheckpoint()]
    options: dict[str, Any] = {"logger": TensorBoardLogger(home), "log_every_n_steps": 10**6, "callbacks": callbacks}
    quiet(trainer, default_root_dir=home, enable_progress_bar=True, **options).fit(Logs(), loader(num_batches))


def evaluate(trainer: type[pl.Trainer], folder: Path, num_batches: int) -> None:
    quiet(trainer).test(Net(), loader(num_batches), verbose=False)


CASES: dict[str, tuple[Callable[[type[pl.Trainer], Path, int], None], Callable[[int], None], int]] = {
    "training": (fit_as_users_do, by_hand, 28),  # -2 when this was written; some twenty with Python 3.10
    "evaluation": (evaluate, evaluated_by_hand, 24),  # 8; 1334
}
"""What is done, what does it by hand, and calls that a batch may cost beyond: twenty or thirty more than it does."""


@pytest.mark.parametrize("case", CASES)
def test_a_step_costs_little_more_than_one_written_by_hand(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # pain 15
    monkeypatch.setattr("evener.trainer.loops.step_plan.REFRESH_S", 1e9)  # slow steps would refresh more often
    run, hand, bound = CASES[case]
    ours, lightning = (calls_per_batch(partial(run, trainer, tmp_path)) for trainer in (Trainer, pl.Trainer))
    assert ours - calls_per_batch(hand) <= bound
    assert ours < lightning / 7


def test_little_happens_between_epochs() -> None:  # pain 15: an epoch's gap
    def run(num_epochs: int) -> None:
        quiet(max_epochs=num_epochs).fit(Net(), loader(2))

    run(2)
    run(12)
    # 1083 when this was written, 210 of them for two batches: about a millisecond. Lightning 2.6.6: 2190
    assert (num_calls(lambda: run(12)) - num_calls(lambda: run(2))) / 10 < 1500


class Pids(Dataset[int]):
    """The process that loads each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Asks(Tiny):
    """Keeps the processes that its batches come from."""

    pids: list[int]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pids += batch.tolist()
        return super().training_step(torch.zeros(1, 1), batch_idx)


def test_persistent_workers_live_through_all_epochs() -> None:
    module = Asks()
    module.pids = []
    workers = DataLoader(Pids(), batch_size=4, num_workers=1, persistent_workers=True)
    quiet(max_epochs=3).fit(module, workers)
    assert len(module.pids) == 3 * 8
    assert len({*module.pids, os.getpid()}) == 2
