"""Modules that keep something from layer to layer run their micro-batches one after the other.

Cause of the failures: micro-batches take turns at every stage, so that one list held features of several.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import Case, Net, assert_equal, baseline, run
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from evener.strategies import ModelParallelStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own


class Keeps(nn.Module):
    """A layer that keeps a loss of its own on itself, and appends to a list where it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.loss: Any = None
        self.kept: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.kept is None:
            self.loss = x.square().mean()
        elif self.training:
            self.kept.append(x)
        return x


class KeepingNet(Net):
    """Its layers keep features, or a loss of their own, which its loss reads at the end of the step."""

    def __init__(self, keeps_list: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Keeps(), nn.Tanh(), nn.Linear(6, 3))
        self.features: list[Tensor] = []
        if keeps_list:
            self.net[2].kept = self.features

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + sum(feature.square().mean() for feature in self.features)
        self.features.clear()
        return loss if self.net[2].loss is None else loss + self.net[2].loss


class Scaled(nn.Module):
    """A layer that does something else in evaluation mode, and while it is off."""

    def __init__(self) -> None:
        super().__init__()
        self.is_off = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_off else x * (2 if self.training else 3)


class SettingNet(Net):
    """Sets something for its first call of the layers, and sets it back."""

    def __init__(self, sets: Callable[["SettingNet", bool], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), Scaled(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), Scaled())
        self.other = nn.Linear(6, 3)
        self.sets = sets

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.read(batch)
        self.sets(self, True)
        first = self.net(x)
        self.sets(self, False)
        return cross_entropy(self.net(x), y) + first.square().mean() + self.other.weight.square().mean()


def switched_off(m: SettingNet, is_set: bool) -> None:
    """As adapters are for the reference of preference optimization."""
    m.net[1].is_off = m.net[5].is_off = is_set


def exchanged(m: SettingNet, is_set: bool) -> None:
    m.net[4], m.other = m.other, m.net[4]


class FunctionalNet(Net):
    """Computes its loss by a function."""

    def __init__(self, function: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.function(self, *self.read(batch))


def with_other_weights(m: Net, x: Tensor, y: Tensor) -> Tensor:
    """As a step of MAML."""
    halves = {name: parameter / 2 for name, parameter in m.net.named_parameters()}
    return cross_entropy(functional_call(m.net, halves, (x,)), y)


def transformed(m: Net, x: Tensor, y: Tensor) -> Tensor:
    """Gradients by the input, which `torch.func` computes sample by sample."""
    by_input = vmap(grad(lambda sample: m.net(sample).square().sum()))(x)
    return cross_entropy(m.net(x), y) + by_input.square().mean()


MODULES: dict[str, Callable[[], Net]] = {
    "kept in a list": lambda: KeepingNet(True),
    "kept as an attribute": lambda: KeepingNet(False),
    "layers switched off": lambda: SettingNet(switched_off),
    "layers exchanged": lambda: SettingNet(exchanged),
    "other weights": lambda: FunctionalNet(with_other_weights),
    "torch.func": lambda: FunctionalNet(transformed),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_step_keeps_on_the_module_stays_its_micro_batch_s(name: str) -> None:
    case = Case(MODULES[name])
    assert_equal(run(case, ModelParallelStrategy(num_microbatches=3), devices=2), baseline(case), 1e-10)
