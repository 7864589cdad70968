"""The backward pass of replicas is one of autograd: whatever goes backward through it has one device's numbers."""

import copy
import gc
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import Case, Net, assert_equal, baseline, fit, make_module, run
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.strategies import BalancedDataParallelStrategy, DataParallelStrategy, DDPStrategy
from evener.strategies import SingleDeviceStrategy as Single


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
    warnings.simplefilter("ignore")  # Lightning's advice; an error would end the rank
    return [_fit_unused(), _fit_unused(find_unused_parameters=True), _fit_unused(find_unused_parameters=False)]


def test_parameters_without_a_gradient_under_ranks() -> None:
    for found in run_ranks(_fit_each, 2):
        for weights in found[:2]:
            torch.testing.assert_close(weights, baseline(Case(Unused)).weights, rtol=0, atol=1e-10)
        assert found[2].startswith("ddp: parameters took no part in the loss: extra.weight, extra.bias. Set")
