"""Replicas have one device's numbers, whatever goes backward through them, hooks them or writes to their weights."""

import copy
import gc
import io
import weakref
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from parity import Case, Net, TiedNet, assert_equal, baseline, fit, make_module, run
from pytorch_lightning.callbacks import ModelPruning
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.strategies import BalancedDataParallelStrategy, ConfigError, DataParallelStrategy, DDPStrategy
from evener.strategies import SingleDeviceStrategy as Single
from evener.trainer import Trainer


class Twice(Net):
    """Goes backward twice through one graph."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        (3 * loss).backward()


class Differentiated(Net):
    """Takes its gradients by `torch.autograd.grad`, and sets them."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient / gradient.norm()


class Checkpointed(Net):
    """Computes a layer again, by a backward pass within the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[:2](x)
        return checkpoint(self.net[2], hidden, use_reentrant=True) if self.training else self.net[2](hidden)  # type: ignore[no-any-return]


class Unused(Net):
    """Has a layer that takes part in every second batch only, which AdamW must leave alone; it has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 3)
        self.extra.weight.register_hook(lambda gradient: gradient * 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + self.extra(self.read(batch)[0]).square().mean() if batch_idx % 2 else loss

    def on_after_backward(self) -> None:
        self.gradients.append(torch.stack([p.grad.sum() for p in self.net.parameters() if p.grad is not None]))
        assert (self.extra.weight.grad is None) == (self.trainer.fit_loop.batch_idx % 2 == 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


class Penalized(Net):
    """Adds the size of its gradients to its loss, by the graph of the gradients."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


class Attacked(Net):
    """Goes backward in its step, for the gradient of its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, *rest = self.read(batch)
        x = x.clone().requires_grad_()
        self.net(x).square().mean().backward()
        assert x.grad is not None
        self.zero_grad()
        return super().training_step((x.detach() + 0.1 * x.grad.sign(), *rest), batch_idx)  # type: ignore[no-any-return]


class Copied(Net):
    """Copies its layers in its step, and goes backward through the copies."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.read(batch)[0]
        file = io.BytesIO()
        torch.save(self.net, file)
        file.seek(0)
        for layers in (copy.deepcopy(self.net), torch.load(file, weights_only=False)):
            layers(x).square().mean().backward()
            assert all(type(p) is nn.Parameter and p.is_leaf and p.grad is not None for p in layers.parameters())
        return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]


class Frozen(Net):
    """Freezes a layer for a part of its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.net[0].parameters():
            parameter.requires_grad = False
        x = self.read(batch)[0]
        loss = self.net(x).square().mean()
        self.net[0].requires_grad_()
        assert all(parameter.requires_grad for parameter in self.parameters())
        return loss + super().training_step(batch, batch_idx)


STRATEGIES = [DataParallelStrategy, lambda: BalancedDataParallelStrategy(gpu0_chunk=0)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("module", [Twice, Differentiated, Checkpointed, Unused, Penalized, Attacked, Copied, Frozen])
def test_what_goes_backward_equals_one_device(module: type[Net], strategy: Any) -> None:
    assert_equal(run(Case(module), strategy(), devices=3), baseline(Case(module)), 1e-10)


def scaled() -> Case:
    """With a gradient scaler, which finds infinite gradients in its first steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return Case(Checkpointed, num=22, dtype=torch.float32, trainer={"plugins": [plugin], "accumulate_grad_batches": 2})


def test_a_gradient_scaler_scales_what_goes_backward() -> None:
    found, expected = run(scaled(), DataParallelStrategy(), devices=2), run(scaled(), Single(), devices=1)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-2)


def test_a_module_is_released_after_its_run() -> None:
    """A node of the graph held the runner, whose replicas hold the node: a cycle that Python can't see."""
    module = make_module(Case())
    fit(Case(), module, DataParallelStrategy())
    left = weakref.ref(module)
    del module
    gc.collect()
    assert left() is None


def _fit_unused(**options: Any) -> Any:
    strategy = DDPStrategy(devices_per_process=2, batch_size_is="global", timeout_s=60, **options)
    try:
        return run(Case(Unused), strategy, devices=4).weights
    except RuntimeError as exc:
        return str(exc)


def _fit_each() -> list[Any]:
    return [_fit_unused(), _fit_unused(find_unused_parameters=True), _fit_unused(find_unused_parameters=False)]


def test_parameters_without_a_gradient_under_ranks() -> None:
    for found in run_ranks(_fit_each, 2):
        for weights in found[:2]:
            torch.testing.assert_close(weights, baseline(Case(Unused)).weights, rtol=0, atol=1e-10)
        assert found[2].startswith("ddp: parameters took no part in the loss: extra.weight, extra.bias. Set")


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


class RemovedByTheStep(Once):
    """Registers hooks in the first step, one of which has a weight learn three times as fast; removes them later."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            self.handle.remove()
            self.handles["weight"].remove()
        return super().training_step(batch, batch_idx)

    def register(self) -> None:
        self.handle = self.net[0].register_forward_hook(self.scale)
        self.handles = {"weight": self.net[0].weight.register_hook(lambda gradient: gradient * 3)}


@pytest.mark.parametrize("threads", [False, True])
def test_what_a_step_leaves_in_one_part_is_left_on_whole_batches(threads: bool) -> None:
    case = Case(RemovedByTheStep)
    assert_equal(run(case, DataParallelStrategy(threads=threads), devices=3), baseline(case), 1e-10)


@pytest.mark.parametrize("strategy", [*STRATEGIES, lambda: DataParallelStrategy(threads=True)])
def test_pruning_equals_one_device(strategy: Any) -> None:
    """`gpu0_chunk=0` pruned other weights: torch's pruning sets the layer's weight in a hook, and the root ran none."""
    found: list[Tensor] = []
    for used, devices in ((strategy(), 3), (Single(), 1)):
        module = make_module(Case())
        layers: Any = [(module.net[0], "weight"), (module.net[2], "weight")]
        pruning = ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.3)
        fit(Case(), module, used, devices, callbacks=[pruning], max_epochs=4)
        found.append(torch.cat([layer.weight.detach().flatten() for layer, _ in layers]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)
    assert 0 < int((found[0] == 0).sum()) < found[0].numel()


def test_hooks_that_a_step_leaves_are_refused_where_batches_must_be_cut() -> None:
    case = Case(Once)
    with pytest.raises(ConfigError, match=r"training_step registers or removes hooks.*Register them in __init__"):
        fit(case, make_module(case), DataParallelStrategy(global_view=False))


class Sharp(torch.optim.SGD):
    """Sharpness-aware: climbs through `parameter.data`, computes again, and descends from where it was."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.data.clone() for p in parameters]
        for p in parameters:
            p.data.add_(p.grad, alpha=0.5)
        closure()
        for p, old in zip(parameters, before, strict=True):
            p.data.copy_(old)
        super().step()
        return loss


class Climbs(Net):
    def configure_optimizers(self) -> Any:
        return Sharp(self.parameters(), lr=0.1)


class Written(TiedNet):
    """With a frozen layer, which is written to in one of the ways after the fourth step."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 4:
            self.halve()

    @torch.no_grad()
    def halve(self) -> None:
        if self.write == "data is set":
            self.frozen.weight.data = self.frozen.weight.data * 0.5
        else:
            self.frozen.weight.data.mul_(0.5)


class Average(pl.Callback):
    """Moves weights after each batch, and exchanges them for an evaluation."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.9)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(2)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        for parameter in module.parameters():
            parameter.data.div_(2)


WRITES = {
    **{
        f"frozen, {write}": Case(partial(Written, write), num=40, trainer={"max_epochs": 1})
        for write in ("data", "data is set")
    },
    "average": Case(trainer={"callbacks": [Average()]}),
    "climbs": Case(Climbs, num=22, trainer={"accumulate_grad_batches": 2}),
    "climbs in a part": Case(Climbs, strategy={"submodule": "net"}),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("trainer", [Trainer, pl.Trainer])
def test_weights_written_between_two_forward_passes_are_copied(name: str, trainer: Any) -> None:
    """No version shows `parameter.data.add_`: the second forward ran with the first one's weights, and those without
    gradients were copied after optimizer steps only."""
    case = WRITES[name]
    expected = baseline(case) if trainer is Trainer else run(case, Single(), trainer, devices=1)
    assert_equal(run(case, DataParallelStrategy(**case.strategy), trainer, devices=2), expected, 1e-10)
