"""What a look at a few samples leaves in a module, and what steps carry on, is that of one device."""

import random
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from parity import Case, make_trainer
from regression import weights
from test_verifier import Net, data
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from evener.strategies import DataParallelStrategy, DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy


class Carries(Net):
    """Carries its rows' states to the next batch, and counts samples in training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = 0.0

    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.state = self.state + x.detach()
        return super().loss(self.state, y)


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.num += len(x)
        return super().loss(x, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num += len(batch[0])


class InPlace(Net):
    """Counts classes in an array, a tensor within a dictionary, and a Counter; returns rows of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.counter, self.inside = np.zeros(2), Counter[int](), {"all": torch.zeros(2)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.net(batch[0])
        for row in rows.numpy().argmax(1):
            self.array[row] += 1
            self.inside["all"][row] += 1
            self.counter[row] += 1
        self.log("median", rows.median())
        return rows


class Draws(Net):
    """Draws a factor for each batch from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = random.Random(1)

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return super().loss(x * self.generator.uniform(0.5, 2), y)


class DrawsInNumpy(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)


class Pairs(Net):
    """Compares each even row with the next one."""

    def loss(self, x: Tensor, y: Tensor) -> Any:
        first, second = self.net(x)[: len(x) // 2 * 2].view(-1, 2, 2).unbind(1)
        return F.softplus(first - second).mean()


class Episodes(Net):
    """Takes batches of seven rows alone."""

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return self.net(x).view(7, -1).var(0).sum()


def trained(kind: type[Net], strategy: Any, devices: int = 2, batch_size: int = 7) -> tuple[Tensor, dict[str, Any]]:
    """The weights after two epochs of three batches, and what else the module and its trainer have."""
    module, loader = kind(), DataLoader(data(), batch_size)
    trainer = make_trainer(Case(), strategy, devices=devices, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, loader, *([loader] if kind in (Counts, InPlace) else []))
    kept = {name: getattr(module, name, None) for name in ("num", "array", "counter", "inside")}
    return weights(module), {**kept, **trainer.callback_metrics}


@pytest.mark.parametrize("strategy", [DataParallelStrategy, lambda: ModelParallelStrategy(num_microbatches=2)])
@pytest.mark.parametrize("kind", [Carries, Counts, InPlace, Draws, DrawsInNumpy, Pairs, Episodes])
def test_what_steps_keep_and_draw_is_one_device_s(kind: type[Net], strategy: Any) -> None:
    (found, kept), (expected, known) = trained(kind, strategy()), trained(kind, SingleDeviceStrategy(), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(kept.pop("array"), known.pop("array"), rtol=0, atol=0)
    torch.testing.assert_close(kept, known, rtol=0, atol=1e-12)
    if kind is Counts:
        assert kept["num"] == 4 * 21
    if kind is InPlace:
        assert kept["counter"].total() == 2 * 21


def _of_ranks(kind: type[Net], batch_size: int) -> Tensor:
    warnings.simplefilter("ignore")  # Lightning's own
    return trained(kind, DDPStrategy(batch_size_is="global"), 2, batch_size)[0]


@pytest.mark.parametrize(("kind", "batch_size"), [(Pairs, 6), (Draws, 7)])
def test_ranks_with_parts_of_an_odd_number_of_rows_train_as_one_device(kind: type[Net], batch_size: int) -> None:
    expected, _ = trained(kind, SingleDeviceStrategy(), 1, batch_size)
    for found in run_ranks(_of_ranks, 2, kind, batch_size):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
