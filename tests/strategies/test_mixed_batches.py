"""Under ranks a hook or a collate function that mixes samples has a rank's; it is refused before the first step."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import quiet_trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate

from evener.strategies import DataParallelStrategy, DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from evener.strategies.core.errors import ConfigError

SAMPLES = [(torch.linspace(i, i + 1, 16).cos(), torch.tensor(i % 3)) for i in range(12)]
_OWN = np.random.default_rng(0)


def drawn_mixture(x: Tensor) -> Tensor:
    share = torch.rand(())
    return share * x + (1 - share) * x[torch.randperm(len(x))]


def halves(x: Tensor) -> Tensor:
    return torch.cat([x[:, :8], x.roll(1, 0)[:, 8:]], 1)


APART: dict[str, Callable[[Tensor], Any]] = {
    "each sample's own mean": lambda x: x - x.mean(1, keepdim=True),
    "noise": lambda x: x + torch.randn_like(x),
    "flips": lambda x: torch.where(torch.rand(len(x), 1) < 0.5, x, x.flip(1)),
    "numpy's noise": lambda x: x * torch.from_numpy(np.random.rand(len(x), 1)).float(),
    "another generator's noise": lambda x: x * torch.from_numpy(_OWN.random((len(x), 1))).float(),
    "views": lambda x: torch.cat([x, -x]),
    "a shared factor": lambda x: x * torch.rand(()),
    "in place": lambda x: x.mul_(2),
    "an error": lambda x: x if len(x) < 8 else [][0],
}
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "mixture": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "halves": halves,
    "centred": lambda x: x - x.mean(0),
    "scaled": lambda x: x / x.norm(),
}


def by_length(samples: list[Any]) -> Any:
    """Sorted by length and padded to the longest, as recurrent layers read them: time is the first dimension."""
    rows = sorted((x[: 4 + round(12 * float(x[0].abs()))] for x, _ in samples), key=len, reverse=True)
    return pad_sequence(rows), torch.tensor([len(row) for row in rows])


def drawn_in_time(samples: list[Any]) -> Any:
    """Time is the first dimension, and has twice as many steps as samples are tried."""
    x, y = default_collate(samples)
    return (x + torch.randn_like(x)).T, y


def joined(*nums: int) -> Callable[[list[Any]], Any]:
    """Join samples of several rows each, such as the nodes of graphs, one after the other."""

    def collate(samples: list[Any]) -> Any:
        rows = [
            x.expand(num, 16) * torch.arange(1.0, 1 + num)[:, None] for (x, _), num in zip(samples, nums, strict=False)
        ]
        return torch.cat(rows), torch.tensor(nums[: len(samples)])

    return collate


def collating(function: Callable[[Tensor], Any]) -> Callable[[list[Any]], Any]:
    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return function(x), y

    return collate


class Taught(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(3)), list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0].reshape(len(batch[0]), -1, 1) * self.weight).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Hooked(Taught):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.seen = function, list[int]()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.training
        self.seen.append(len(batch[0]))
        return self.function(batch[0]), batch[1]


def told(strategy: Any, module: Taught, collate: Any = default_collate) -> str:
    """The refusal before the first step, or the warning; empty if there is none."""
    trainer = quiet_trainer(strategy, 2, max_steps=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(SAMPLES, 6, collate_fn=collate))
        except ConfigError as exc:
            assert trainer.global_step == 0
            return str(exc) if "mixes" in str(exc) else ""
    return next((str(one.message) for one in seen if "mixes" in str(one.message)), "")


def ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(batch_size_is="global", timeout_s=60, **options)


def _told_of_hooks() -> Any:
    return {name: told(ddp(), Hooked(function)) for name, function in (APART | MIXED).items()}


def test_hooks_that_mix_samples_are_refused() -> None:
    for found in run_ranks(_told_of_hooks, 2, timeout_s=120):
        assert [name for name in APART if found[name]] == []
        for name in MIXED:
            assert found[name].startswith("ddp: on_after_batch_transfer mixes the samples of a batch: with one sample")


def _told_of_collates() -> Any:
    others = {"by length": by_length, "in time": drawn_in_time}
    others |= {"16 nodes": joined(1, 1, 1, 1, 1, 2, 4, 5), "17 nodes": joined(1, 1, 1, 1, 2, 2, 4, 5)}
    collates = others | {name: collating(function) for name, function in (APART | MIXED).items()}
    return {name: told(ddp(), Taught(), collate) for name, collate in collates.items()}


def test_collate_functions_that_mix_samples_are_refused() -> None:
    for found in run_ranks(_told_of_collates, 2, timeout_s=120):
        assert {name for name, refusal in found.items() if refusal} == MIXED.keys()
        assert found["mixture"].startswith("ddp: the loader's collate_fn mixes the samples of a batch: with one")


def _told_otherwise() -> Any:
    cut, manual, unverified, drawn = Hooked(halves), Hooked(halves), Hooked(halves), Hooked(drawn_mixture)
    manual.automatic_optimization = False
    fsdp = told(FSDPStrategy(batch_size_is="global", timeout_s=60), cut), told(ddp(), manual)
    return *fsdp, told(ddp(verify_loss=False), unverified), told(ddp(), drawn), drawn.seen


def test_fsdp_and_manual_optimization_refuse_it_too_and_random_mixtures_are_told() -> None:
    for rank, (fsdp, manual, unverified, drawn, seen) in enumerate(run_ranks(_told_otherwise, 2, timeout_s=120)):
        assert fsdp.startswith("fsdp: on_after_batch_transfer mixes the samples of a batch: with one sample")
        assert manual.startswith("ddp: on_after_batch_transfer mixes the samples of a batch: with one sample")
        assert unverified == ""
        at_random = "ddp: on_after_batch_transfer mixes the samples of a batch at random. Each rank mixes its own"
        assert drawn.startswith(at_random) is (rank == 0)
        assert seen == [3]  # nothing is left of the batches that were tried


@pytest.mark.parametrize("name", MIXED)
def test_dp_mixes_the_whole_batch(name: str) -> None:
    weights = list[Tensor]()
    for strategy, devices in ((SingleDeviceStrategy(), 1), (DataParallelStrategy(), 2)):
        module = Hooked(MIXED[name])
        quiet_trainer(strategy, devices, max_steps=1).fit(module, DataLoader(SAMPLES, 6))
        weights.append(module.weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
