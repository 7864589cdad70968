"""Micro-batches that take turns: what arrives of their gradients, and what a module keeps from layer to layer.

Cause of the failures of the latter: one list held features of several. Memory: late_device/test_late_memory.py.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from parity import Case, Net, SparseNet, assert_equal, baseline, fit, make_module, run
from stage_modules import DEEP, SquareNet
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from evener.strategies import ConfigError, DataParallelStrategy, ModelParallelStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own


class Twice(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


def test_a_loss_goes_backward_once() -> None:
    with pytest.raises(RuntimeError, match="can go backward once only"):
        fit(Case(), Twice().double(), ModelParallelStrategy(num_microbatches=2))


class OldGradients(Net):
    """Notes, at each micro-batch of the second step, whether the last step's gradient is still in memory."""

    old: Any = None
    found: ClassVar[list[bool]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 0:
            type(self).old = weakref.ref(self.net[0].weight.grad)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1 and type(self).old is not None:
            type(self).found.append(type(self).old() is not None)
        return super().training_step(batch, batch_idx)


class ReadsOld(OldGradients):
    """Reads the last step's gradient before it is cleared."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.net[0].weight.grad is not None:
            self.losses.append(self.net[0].weight.grad.norm().item())


@pytest.mark.parametrize(
    ("module", "trainer", "expected"),
    [
        (OldGradients, {}, [True, True, False, False]),  # F0 F1 B0 F2 B1 F3
        (ReadsOld, {}, [True] * 4),
        (OldGradients, {"accumulate_grad_batches": 2}, [True] * 4 + [False] * 4),  # cleared after the first batch
    ],
)
def test_gradients_of_the_last_step_make_room_if_nobody_reads_them(
    module: type[OldGradients], trainer: dict[str, Any], expected: list[bool]
) -> None:
    case = Case(module, num=16, trainer={"max_epochs": 1, "limit_val_batches": 0, **trainer})
    module.found, module.old = [], None
    fit(case, make_module(case), ModelParallelStrategy(num_microbatches=4))
    assert module.found == expected


class Padding(Net):
    """Micro-batches of padding only: all weights are zero, and shares are equal."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "loss_weight": 0}


CASES = {
    "deep": DEEP,
    "tied": Case(SquareNet),
    "padding": Case(Padding, num=12, strategy={"verify": False}),
    "reads the last step's": Case(ReadsOld),
    "sparse": Case(SparseNet),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("name", "num", "stages", "output_device"),
    [
        *(("deep", 9, 2, "first"), ("tied", 2, 2, "first"), ("deep", 4, 1, "last"), ("deep", 4, 4, "last")),
        *((name, 2, 2, "last") for name in CASES),
    ],
)
def test_training_equals_one_devices(name: str, num: int, stages: int, output_device: Any, schedule: Any) -> None:
    given: Any = {"schedule": schedule, "output_device": output_device, **CASES[name].strategy}
    found = run(CASES[name], ModelParallelStrategy(num_microbatches=num, **given), devices=stages)
    assert_equal(found, baseline(CASES[name]), 1e-10)


class ReadingNet(Net):
    """Logs, in its step, the gradients of the last step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        gradient = self.net[0].weight.grad
        self.log("gradient", 0.0 if gradient is None else gradient.norm())
        return self.loss(batch)


@pytest.mark.parametrize(
    "strategy", [partial(ModelParallelStrategy, num_microbatches=2), DataParallelStrategy], ids=["stages", "replicas"]
)
def test_a_step_that_reads_gradients_gets_whole_batches(strategy: Any) -> None:
    # `.grad` held sums of other micro-batches; that of replicas was None
    case = Case(ReadingNet)
    assert_equal(run(case, strategy(), devices=2), baseline(case), 1e-10)
    with pytest.raises(ConfigError, match=r"reads the \.grad of a parameter"):
        run(case, strategy(global_view=False), devices=2)


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


class SwitchingNet(Net):
    """Switches layers off for its first call, as adapters are for the reference of preference optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), Scaled(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.read(batch)
        self.net[1].is_off = self.net[5].is_off = True
        first = self.net(x)
        self.net[1].is_off = self.net[5].is_off = False
        return cross_entropy(self.net(x), y) + first.square().mean()


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
    "layers switched off": SwitchingNet,
    "other weights": lambda: FunctionalNet(with_other_weights),
    "torch.func": lambda: FunctionalNet(transformed),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_step_keeps_on_the_module_stays_its_micro_batch_s(name: str) -> None:
    case = Case(MODULES[name])
    assert_equal(run(case, ModelParallelStrategy(num_microbatches=3), devices=2), baseline(case), 1e-10)
