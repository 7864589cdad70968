"""Modules that keep something from layer to layer run their micro-batches in order: threads would share it.

Cause of the failures: micro-batches in threads take turns at every stage, so that one list held features of several.
"""

from typing import Any

import pytest
import torch
from parity import Case, Net, assert_equal, baseline, run
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

from evener.strategies import ModelParallelStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own


class HookedNet(Net):
    """Adds to its loss what a hook on the first layer kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.features: list[Tensor] = []
        self.register()

    def register(self) -> None:
        self.net[0].register_forward_hook(self.keep)

    def keep(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if self.training:
            self.features.append(output)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        for feature in self.features:
            loss = loss + feature.square().mean()
        self.features.clear()
        return loss


class Collector(nn.Module):
    """A layer that keeps a loss of its own on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        self.loss = x.square().mean()
        return x


class Appender(nn.Module):
    """A layer that appends to a list."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.training:
            self.kept.append(x)
        return x


class AppendingNet(HookedNet):
    """Layers append features to one list."""

    def register(self) -> None:
        self.net[2] = Appender(self.features)


class CollectingNet(Net):
    """Reads, at the end of the step, an attribute that a layer has set."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), Collector(), nn.Linear(6, 6), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        return loss + self.net[1].loss


class SwappingNet(Net):
    """Calls its layers with other weights, as a step of MAML does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.read(batch)
        halves = {name: parameter / 2 for name, parameter in self.net.named_parameters()}
        return cross_entropy(functional_call(self.net, halves, (x,)), y)


class Scaled(nn.Module):
    """A layer that does something else in evaluation mode, and while it is off."""

    def __init__(self) -> None:
        super().__init__()
        self.is_off = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_off else x * (2 if self.training else 3)


class SettingNet(Net):
    """Sets something for its first call of the layers, and sets it back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), Scaled(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), Scaled())
        self.other = nn.Linear(6, 3)
        self.is_halved = False

    def set_for_a_call(self, is_set: bool) -> None:
        raise NotImplementedError

    def scores(self, x: Tensor) -> Tensor:
        return self.net(x) / (2 if self.is_halved else 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.read(batch)
        self.set_for_a_call(True)
        first = self.scores(x)
        self.set_for_a_call(False)
        return cross_entropy(self.scores(x), y) + first.square().mean() + self.other.weight.square().mean()


class FlagNet(SettingNet):
    """Switches its layers off for a call, as adapters are for the reference of preference optimization."""

    def set_for_a_call(self, is_set: bool) -> None:
        self.net[1].is_off = self.net[5].is_off = is_set


class OwnFlagNet(SettingNet):
    """Sets a flag on the module itself."""

    def set_for_a_call(self, is_set: bool) -> None:
        self.is_halved = is_set


class EvaluatingNet(SettingNet):
    """Calls its layers in evaluation mode first."""

    def set_for_a_call(self, is_set: bool) -> None:
        self.net.train(not is_set)


class FreezingNet(SettingNet):
    """Goes through frozen layers first, as the generator's loss goes through a discriminator."""

    def set_for_a_call(self, is_set: bool) -> None:
        self.net.requires_grad_(not is_set)
        self.net[0].requires_grad_()


class ExchangingNet(SettingNet):
    """Puts another layer in a place for a call."""

    def set_for_a_call(self, is_set: bool) -> None:
        self.net[4], self.other = self.other, self.net[4]


class TransformingNet(Net):
    """Has gradients by its input in its loss, which `torch.func` computes sample by sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.read(batch)
        by_input = vmap(grad(lambda sample: self.net(sample).square().sum()))(x)
        return cross_entropy(self.net(x), y) + by_input.square().mean()


class Squared(nn.Module):
    """A weight from a parameter of which the backward pass needs the values."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.square()


class CachingNet(Net):
    """Computes its parametrized weights once per step."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.net[0], self.net[2]):
            parametrize.register_parametrization(layer, "weight", Squared())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with parametrize.cached():
            return super().training_step(batch, batch_idx)


class ForwardNet(Net):
    """Has derivatives in one direction in its loss, computed forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.read(batch)
        with forward_ad.dual_level():
            scores, along = forward_ad.unpack_dual(self.net(forward_ad.make_dual(x, torch.ones_like(x))))
        assert along is not None
        return cross_entropy(scores, y) + along.square().mean()


SHARING = [TransformingNet, ForwardNet, CachingNet]
SETTING = [FlagNet, OwnFlagNet, EvaluatingNet, FreezingNet, ExchangingNet]


@pytest.mark.parametrize("module", [HookedNet, AppendingNet, CollectingNet, SwappingNet, *SETTING, *SHARING])
def test_what_a_step_keeps_on_the_module_stays_its_micro_batch_s(module: type[Net]) -> None:
    case = Case(module)
    assert_equal(run(case, ModelParallelStrategy(num_microbatches=3), devices=2), baseline(case), 1e-10)
