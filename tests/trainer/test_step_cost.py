"""What a step costs in Python: calls are counted, which no other work on the machine changes, instead of timed.

`benchmarks/step_overhead.py` has the times.
"""

import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tiny import Tiny, quiet
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCohenKappa, MulticlassF1Score

from evener.strategies import DDPStrategy
from evener.trainer import Trainer

FEW, MANY = 20, 40


class Net(Tiny):
    """A small perceptron."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))


class Rich(Net):
    """A step as users write them: three values, one of them an epoch mean; `rich` has metrics and a scheduler, too."""

    def __init__(self, rich: bool) -> None:
        super().__init__()
        self.metrics = metrics() if rich else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.layers(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True)
        self.log("scaled", loss.detach() * 2)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        if self.metrics is not None:
            self.metrics.update(logits.detach(), batch[1])
            self.log_dict(self.metrics, on_step=False, on_epoch=True)  # type: ignore[arg-type]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.metrics is None:
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "interval": "step"}]


class Counts(pl.Callback):
    """Counts samples in a batch hook."""

    num_samples = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_samples += len(batch[0])


def metrics() -> MetricCollection:
    """Two metrics that share their states, and one of its own."""
    return MetricCollection(
        {"accuracy": MulticlassAccuracy(2), "f1": MulticlassF1Score(2), "kappa": MulticlassCohenKappa(2)}
    )


def loader(num_batches: int) -> DataLoader[Any]:
    batches = [(torch.randn(4, 8), torch.randint(2, (4,))) for _ in range(num_batches)]
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


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


def by_hand(num_batches: int, rich: bool) -> None:
    """The arithmetic of `Rich(rich)`, with its bookkeeping but for what happens only at log points."""
    module, own, total, num_samples = Net(), metrics() if rich else None, torch.zeros(()), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for index, (inputs, targets) in enumerate(loader(num_batches)):
        logits = module.layers(inputs)
        loss = nn.functional.cross_entropy(logits, targets)
        if own is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            (loss / 4).backward()
            if index % 4 == 3:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            own.update(logits.detach(), targets)
        total += loss.detach() * len(inputs)
        num_samples += len(inputs)


def evaluated_by_hand(num_batches: int) -> None:
    module, total = Net().eval(), torch.zeros(())
    with torch.inference_mode():
        for inputs, targets in loader(num_batches):
            total += nn.functional.cross_entropy(module.layers(inputs), targets)


def fit_as_users_do(trainer: type[pl.Trainer], folder: Path, rich: bool) -> Callable[[int], None]:
    def run(num_batches: int) -> None:
        home = tempfile.mkdtemp(dir=folder)
        options: dict[str, Any] = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 4} if rich else {}
        loggers = [TensorBoardLogger(home), *([CSVLogger(home, name="csv")] if rich else [])]
        callbacks = [Counts(), LearningRateMonitor(), ModelCheckpoint()]
        given: dict[str, Any] = {"enable_progress_bar": True, "log_every_n_steps": 10**6}
        given |= {"default_root_dir": home, "logger": loggers, "callbacks": callbacks, **options}
        quiet(trainer, **given).fit(Rich(rich), loader(num_batches))

    return run


def evaluate(trainer: type[pl.Trainer], folder: Path) -> Callable[[int], None]:
    def run(num_batches: int) -> None:
        quiet(trainer).test(Net(), loader(num_batches), verbose=False)

    return run


CASES: dict[str, tuple[Callable[[type[pl.Trainer], Path], Callable[[int], None]], Callable[[int], None], int]] = {
    # -2 when this was written; some twenty with Python 3.10
    "typical": (lambda trainer, folder: fit_as_users_do(trainer, folder, False), partial(by_hand, rich=False), 28),
    # 72 (77 where steps are slow), most of them Lightning's own scheduler and learning rate monitor
    "rich": (lambda trainer, folder: fit_as_users_do(trainer, folder, True), partial(by_hand, rich=True), 95),
    "evaluation": (evaluate, evaluated_by_hand, 24),  # 8; 1334
}
"""What is done, what does it by hand, and calls that a batch may cost beyond: twenty or thirty more than it does."""


@pytest.mark.parametrize("case", CASES)
def test_a_step_costs_little_more_than_one_written_by_hand(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # pain 15
    monkeypatch.setattr("evener.trainer.loops.hook_plan.REFRESH_S", 1e9)  # slow steps would refresh more often
    run, hand, bound = CASES[case]
    ours, lightning = (calls_per_batch(run(trainer, tmp_path)) for trainer in (Trainer, pl.Trainer))
    assert ours - calls_per_batch(hand) <= bound
    assert ours < lightning / 7


class Counted(Net):
    """Counts the calls of its process between two of its steps, of training or of a test."""

    num_steps = 0

    def begin_step(self) -> None:
        self.num_steps += 1
        if self.num_steps == FEW:
            self.num_calls = 0
            sys.setprofile(self.count)
        if self.num_steps == MANY:
            sys.setprofile(None)

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.num_calls += event == "call"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.begin_step()
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.begin_step()
        super().test_step(batch, batch_idx)


def train_by_hand(module: Counted, loader: DataLoader[Any]) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    shared = nn.parallel.DistributedDataParallel(module.layers)
    for inputs, targets in loader:
        module.begin_step()
        loss = nn.functional.cross_entropy(shared(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.inference_mode()
def evaluate_by_hand(module: Counted, loader: DataLoader[Any]) -> None:
    total = torch.zeros(())
    for inputs, targets in loader:
        module.begin_step()
        total += nn.functional.cross_entropy(module.layers(inputs), targets) * len(inputs)


DDP = {"fit": (train_by_hand, 83), "test": (evaluate_by_hand, 106)}
"""Twenty more than the calls of a step that follows shares, and what values are computed of."""


def calls_under_ddp() -> dict[str, float]:
    """Calls per step beyond those of a loop by hand, for each method of the trainer; on a rank."""
    gc.disable()
    warnings.simplefilter("ignore")
    data = TensorDataset(torch.randn(2 * 4 * MANY, 8), torch.randint(2, (2 * 4 * MANY,)))
    found: dict[str, float] = {}
    for name, (run, _) in DDP.items():
        hand, ours = Counted(), Counted()
        method = getattr(quiet(strategy=DDPStrategy(timeout_s=120), devices=2), name)
        method(ours, DataLoader(data, 4), **({"verbose": False} if name == "test" else {}))
        run(hand, DataLoader(data, 4, sampler=DistributedSampler(data, 2, torch.distributed.get_rank(), shuffle=False)))
        found[name] = (ours.num_calls - hand.num_calls) / (MANY - FEW)
    return found


@pytest.mark.slow
def test_a_step_of_two_ranks_costs_little_more_than_one_written_by_hand() -> None:
    for name, more in run_ranks(calls_under_ddp, 2)[0].items():
        assert more <= DDP[name][1], name


def calls_per_epoch(trainer: type[pl.Trainer]) -> float:
    """Calls that one more epoch of two batches costs, everything between epochs included."""

    def run(num_epochs: int) -> None:
        quiet(trainer, max_epochs=num_epochs).fit(Net(), loader(2))

    for num_epochs in (2, 12):
        run(num_epochs)
    return (num_calls(lambda: run(12)) - num_calls(lambda: run(2))) / 10


def test_little_happens_between_epochs() -> None:  # pain 15: an epoch's gap
    # 1083 when this was written, 210 of them for two batches: about a millisecond. Lightning 2.6.6: 2190
    assert calls_per_epoch(Trainer) < 1500


class Pids(Dataset[int]):
    """The process that loads each sample."""

    def __len__(self) -> int:
        return 4

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
    workers = DataLoader(Pids(), batch_size=2, num_workers=1, persistent_workers=True)
    quiet(max_epochs=3).fit(module, workers)
    assert len(module.pids) == 3 * 4
    assert len({*module.pids, os.getpid()}) == 2
