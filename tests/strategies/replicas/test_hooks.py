"""Every replica has hooks of its own: those of the root's that were registered between steps, and its own."""

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import Case, Net, assert_equal, baseline, fit, make_module, run
from pytorch_lightning.callbacks import ModelPruning
from torch import Tensor, nn

from evener.strategies import BalancedDataParallelStrategy, ConfigError, DataParallelStrategy, SingleDeviceStrategy

STRATEGIES = [
    DataParallelStrategy,
    lambda: DataParallelStrategy(threads=True),
    lambda: BalancedDataParallelStrategy(gpu0_chunk=0),
]


def both(make: Callable[[], Case], strategy: Any, devices: int = 3) -> list[tuple[Any, pl.Trainer]]:
    """A module and its trainer after a fit with a strategy, and on one device."""
    fitted = []
    for used, num in ((strategy, devices), (SingleDeviceStrategy(), 1)):
        case = make()
        module = make_module(case)
        fitted.append((module, fit(case, module, used, devices=num)))
    return fitted


class Collecting(Net):
    """Adds up what its layers returned, as transformers' `output_hidden_states=True` does."""

    def forward(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        handles = [
            layer.register_forward_hook(lambda layer, inputs, output: states.append(output)) for layer in self.net
        ]
        out = self.net(x)
        for handle in handles:
            handle.remove()
        return out + 0.1 * sum(state.mean(1, keepdim=True) for state in states)


class Scaling(Net):
    """Scales its first layer's output by a hook, which it removes and registers again between steps."""

    def scale(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        assert layer is self.net[0]
        return output * 1.5

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.net[0].register_forward_hook(self.scale)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.handle.remove()
        if batch_idx != 1:
            self.handle = self.net[0].register_forward_hook(self.scale)


class RemovedInAStep(Scaling):
    """Removes its hook by the kept handle in the step itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.handle.remove()
        return super().training_step(batch, batch_idx)


class RemovedLater(Net):
    """Registers a hook in its first forward, and removes it between steps."""

    handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = self.net[0].register_forward_hook(lambda layer, inputs, output: output * 1.5)
        return self.net(x)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 1:
            self.handle.remove()


class Flagged(Net):
    """Notes that it has registered its hook, as transformers' models do."""

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "has_hook", False):
            self.net[0].register_forward_hook(lambda layer, inputs, output: output * 1.5)
            self.has_hook = True
        return self.net(x)


class Once(Net):
    """Registers its hook in the first step; only the step's number says that it has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 0:
            self.register()
        return super().training_step(batch, batch_idx)

    def register(self) -> None:
        self.net[0].register_forward_hook(self.scale)

    def scale(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert layer is self.net[0]
        return output * 1.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam would not notice a factor


class OnceInAList(Once):
    """Notes its hook in a list that it has from the start, and removes it between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []

    def register(self) -> None:
        self.handles.append(self.net[0].register_forward_hook(self.scale))

    def on_train_epoch_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class OnceOnAParameter(Once):
    """Has one weight learn three times as fast."""

    def register(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * 3)


class NotedOnAParameter(OnceInAList):
    """The same where the list says that the hook is there: only the first replica registers it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.handles:
            self.handles.append(self.net[0].weight.register_hook(lambda gradient: gradient * 3))
        return self.loss(batch)


class OnceAccumulated(Once):
    """Clamps what is accumulated of one weight's gradient."""

    def register(self) -> None:
        self.net[0].weight.register_post_accumulate_grad_hook(_clamp)


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


class InEachStep(Once):
    """Registers a parameter's hook in each step, and removes it after the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.handle = self.net[0].weight.register_hook(lambda gradient: gradient * 3)
        return self.loss(batch)

    def on_after_backward(self) -> None:
        super().on_after_backward()
        self.handle.remove()


class RemovedByTheStep(Once):
    """Registers hooks in the first step, and removes them in the third."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            self.handle.remove()
            self.handles["weight"].remove()
        return super().training_step(batch, batch_idx)

    def register(self) -> None:
        self.handle = self.net[0].register_forward_hook(self.scale)
        self.handles = {"weight": self.net[0].weight.register_hook(lambda gradient: gradient * 3)}


class KeepsItsHandle(Net):
    """Registers a hook in a step where it has none, and removes it between steps if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.handle is None:
            self.handle = self.net[0].register_forward_hook(self.scale, with_kwargs=True)
        return super().training_step(batch, batch_idx)

    def scale(self, layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        assert layer is self.net[0]
        return output * 1.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 1 and self.handle is not None:
            self.handle.remove()
            self.handle = None


class KeepsHandles(KeepsItsHandle):
    """The same with a list of handles that the step makes."""

    handles: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.handles:
            self.handles = [self.net[0].register_forward_hook(self.scale, with_kwargs=True)]
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        (self.handle,) = self.handles
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.handles = [self.handle] if self.handle is not None else []


class SharesHandles(KeepsItsHandle):
    """The same with a list that it has from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.handles:
            self.handles.append(self.net[0].register_forward_hook(self.scale, with_kwargs=True))
        return self.loss(batch)


OWN = (Once, OnceInAList, OnceOnAParameter, OnceAccumulated, InEachStep, RemovedByTheStep)
TRAINED: dict[type[Net], list[int]] = {
    # A replica's hook dictionaries were the root's, so that every hook fired on every replica.
    Collecting: [0, 1, 2],
    Scaling: [0, 1, 2],
    RemovedInAStep: [0, 1, 2],
    RemovedLater: [0, 1],  # each replica had registered its own, and only the root's was removed
    Flagged: [0, 1, 2],
    **{module: [0, 1] for module in OWN},  # a parameter's hook saw a replica's gradient twice
    # The list that says so is shared by all replicas; or the root has no samples, and would not register it.
    NotedOnAParameter: [0],
    SharesHandles: [0],
    OnceOnAParameter: [0, 1, 2],
}
"""Modules, with the numbers of their strategies."""


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("module", "number"), [(module, number) for module in TRAINED for number in TRAINED[module]])
def test_hooks_do_what_they_do_on_one_device(module: type[Net], number: int, devices: int) -> None:
    case = Case(module, trainer={"num_sanity_val_steps": 0})  # in an evaluation a list would be one of results
    assert_equal(run(case, STRATEGIES[number](), devices=devices), baseline(case), 1e-10)


def test_a_callbacks_hook_is_called_on_every_replica() -> None:
    rows: list[int] = []

    class Watching(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            module.net[0].register_forward_pre_hook(lambda layer, inputs: rows.append(len(inputs[0])))

    case = Case(num=4, trainer={"callbacks": [Watching()], "max_epochs": 1, "limit_val_batches": 0})
    fit(case, make_module(case), DataParallelStrategy(), devices=2)
    assert rows[-2:] == [2, 2]


def pruned() -> Case:
    made = make_module(Case())
    layers: Any = [(made.net[0], "weight"), (made.net[2], "weight")]
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.3)
    return Case(lambda: made, trainer={"callbacks": [pruning], "max_epochs": 4})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pruning_equals_one_device(strategy: Any) -> None:
    """`gpu0_chunk=0` pruned other weights: torch's pruning sets the layer's weight in a hook, and the root ran none."""
    found, expected = (
        torch.cat([module.net[i].weight.flatten() for i in (0, 2)]).detach() for module, _ in both(pruned, strategy())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert 0 < int((found == 0).sum()) < found.numel()


def test_hooks_that_a_step_leaves_are_refused_where_batches_must_be_cut() -> None:
    case = Case(Once, trainer={"num_sanity_val_steps": 0})
    with pytest.raises(ConfigError, match=r"training_step registers or removes hooks.*Register them in __init__"):
        fit(case, make_module(case), DataParallelStrategy(global_view=False))


@pytest.mark.parametrize("module_type", [KeepsItsHandle, KeepsHandles])
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_the_root_removes_a_hook_by_the_handle_that_a_replica_kept(module_type: type[Net], strategy: Any) -> None:
    found: list[Tensor] = []
    for module, _ in both(lambda: Case(module_type), strategy()):
        assert len(module.net[0]._forward_hooks) == len(module.net[0]._forward_hooks_with_kwargs) == 1
        found.append(module(torch.ones(2, 4).double()).detach())
        module.handle.remove()
        found.append(module(torch.ones(2, 4).double()).detach())
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=1e-10)
