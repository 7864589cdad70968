"""A regression on numbered samples: what the tests of ranks train and compare with one device."""

import warnings
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from distributed import run_ranks
from outcomes import alike, differences, whole
from tiny import Points, quiet  # noqa: F401  # tests of ranks take the logger from here
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from evener.strategies import (
    BalancedDDPStrategy,
    ConfigError,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer

NUM_SAMPLES = 21


class Numbered(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Fixed samples that know their index."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(num, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.y[index], torch.tensor(index)


class Net(pl.LightningModule):
    """A small regression that remembers the samples it saw; optionally weighs its loss by positive targets."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.weighted = weighted
        self.trained: list[list[int]] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        self.trained.append(index.tolist())
        error = (self.net(x) - y) ** 2
        if self.weighted:
            mask = (y > 0).double()
            return {"loss": (error * mask).sum() / mask.sum().clamp_min(1), "loss_weight": mask.sum()}
        loss = error.mean()
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, index = batch
        self.validated += index.tolist()
        self.log("val", ((self.net(x) - y) ** 2).mean(), sync_dist=True, batch_size=len(x))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cat([self.net(batch[0]), batch[2][:, None]], 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def quiet_trainer(strategy: pl.strategies.Strategy, devices: int = 1, **options: Any) -> Trainer:
    """A trainer for two epochs on the CPU that prints and writes nothing."""
    warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
    return quiet(strategy=strategy, devices=devices, **{"max_epochs": 2, **options})


_GLOBAL: dict[str, Any] = {"batch_size_is": "global", "timeout_s": 120}
STRATEGIES: dict[str, tuple[int, Any]] = {
    "single": (1, SingleDeviceStrategy),
    "ddp": (2, lambda: DDPStrategy(**_GLOBAL)),
    "weights": (2, lambda: BalancedDDPStrategy([1, 3], timeout_s=120)),
    "replicas": (4, lambda: DDPStrategy(devices_per_process=2, **_GLOBAL)),
    "stages": (4, lambda: DDPModelParallelStrategy(num_microbatches=2, **_GLOBAL)),
    "shards": (2, lambda: FSDPStrategy(**_GLOBAL)),
}
"""One device, and strategies of two ranks to which the loader's batch is the global one: devices and strategy."""


def trainer_of(name: str, **options: Any) -> Trainer:
    """A quiet trainer with one of `STRATEGIES`."""
    devices, strategy = STRATEGIES[name]
    return quiet_trainer(strategy(), **{"devices": devices, **options})


def assert_as_single(
    function: Any, strategy: str, *args: Any, num_ranks: int = 2, tolerance: float = 1e-10, timeout_s: float = 300
) -> Any:
    """Check that `function(strategy, *args)` returns on each rank what it returns on one device; return that."""
    expected = function("single", *args)
    for rank in run_ranks(function, num_ranks, strategy, *args, timeout_s=timeout_s):
        assert_same(rank, expected, tolerance)
    return expected


def refusal(trainer: Trainer, module: Net, loader: Any) -> str:
    """Fit; the ConfigError that ended it, or nothing."""
    try:
        trainer.fit(module, loader)
    except ConfigError as exc:
        return str(exc)
    return ""


def fit(strategy: pl.strategies.Strategy, devices: int, batch_size: int, case: dict[str, Any]) -> tuple[Net, Trainer]:
    """Fit and validate; a case may set `weighted`, `num`, `shuffle`, and options of the `trainer`."""
    pl.seed_everything(7, verbose=False)
    module = Net(weighted=case.get("weighted", False))
    data = Numbered(case.get("num", NUM_SAMPLES))
    trainer = quiet_trainer(strategy, devices, num_sanity_val_steps=0, **case.get("trainer", {}))
    torch.manual_seed(3)
    loader = DataLoader(data, batch_size, shuffle=case.get("shuffle", False))
    trainer.fit(module, loader, DataLoader(data, batch_size))
    return module, trainer


def weights(module: nn.Module) -> Tensor:
    """All parameters as one vector, whole where they are sharded."""
    return torch.cat([whole(p.detach()).flatten() for p in module.parameters()])


def outcome(module: Net, trainer: Trainer) -> dict[str, Any]:
    """What a training left, as plain values that travel between processes."""
    return {
        "weights": weights(module),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "trained": module.trained,
        "validated": module.validated,
    }


def fit_all(
    strategy_class: Any, cases: dict[str, dict[str, Any]], global_batch: int, num_ranks: int
) -> dict[Any, dict[str, Any]]:
    """The outcomes of all cases for both meanings of the loader's batch size."""
    outcomes = {}
    for name, case in cases.items():
        for batch_size_is in ("global", "per_device"):
            batch_size = global_batch if batch_size_is == "global" else global_batch // num_ranks
            strategy = strategy_class(batch_size_is=batch_size_is, timeout_s=120)
            outcomes[name, batch_size_is] = outcome(*fit(strategy, num_ranks, batch_size, case))
    return outcomes


def assert_same(found: Any, expected: Any, tolerance: float, place: str = "values") -> None:
    """Numbers may differ by rounding, nothing else may."""
    unlike = differences(found, expected, partial(alike, atol=tolerance), place)
    assert not unlike, "; ".join(f"{path}: {mine} instead of {theirs}" for path, (mine, theirs) in unlike.items())
