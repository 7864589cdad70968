"""DDP reduces what is trained, and BatchNorm is synchronized as on one device that has the whole batch."""

import os
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from distributed import run_ranks
from regression import Net, Numbered, assert_as_single, assert_same, quiet_trainer, trainer_of, weights
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.data import DataLoader

from evener.strategies import (
    BalancedDDPStrategy,
    ConfigError,
    DDPModelParallelStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
)
from evener.strategies.distributed.wrapper import SyncBatchNorm

GLOBAL: dict[str, Any] = {"batch_size_is": "global", "timeout_s": 120}


class Thawing(Net):
    """Its first layer is frozen until the second epoch, and then in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.current_epoch == 1 and batch_idx % 2 == 0)


class Growing(Net):
    """Gets a second head in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(2)
            self.head = nn.Linear(3, 4).double()
            self.optimizers().add_param_group({"params": list(self.head.parameters())})  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.head(batch[0]).square().mean() if self.current_epoch else loss


class Late(Net):
    """Unfreezes a layer when the ranks have agreed already what to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


class TogglingLate(Net):
    """Trains its layers in turn from one forward pass: a layer that is toggled off is in the graph already."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.with_gradient: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        for i, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=i == 0)
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()
        self.zero_grad()

    def on_after_backward(self) -> None:
        self.with_gradient.append([name for name, p in self.named_parameters() if p.grad is not None])

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]


class Searching(Net):
    """With an optimizer that decides by the loss, and computes each batch several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=4, line_search_fn="strong_wolfe")


class Editing(Net):
    """Scales its gradients down by their norm, as they are after each backward pass; and replaces their content."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data / (1 + parameter.grad.data.norm())


class Hook(pl.Callback):
    """Registers a communication hook of its own."""

    num_called = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wrapper: Any = trainer.strategy.model
        wrapper.register_comm_hook(self, _own_hook)


def _own_hook(hook: Hook, bucket: dist.GradBucket) -> Future[Tensor]:
    hook.num_called += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


CASES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "plain": (Net, {}),
    "thawing": (Thawing, {}),
    "growing": (Growing, {}),
    "toggling late": (TogglingLate, {}),
    # with accumulation the hook saw this rank's gradients until the last batch; those of all divided by their number
    "editing": (Editing, {"accumulate_grad_batches": 2}),
    "editing, accumulated exactly": (Editing, {"accumulate_grad_batches": 2, "exact_accumulation": True}),
    # the ranks' losses were added without their weights for an optimizer that decides by them
    "searching": (Searching, {"accumulate_grad_batches": 3, "exact_accumulation": True, "limit_train_batches": 1}),
}


def trained(case: str, strategy: Any, devices: int, **more: Any) -> Tensor:
    cls, options = CASES[case]
    module = cls()
    # the last batch has one sample
    quiet_trainer(strategy, devices, **options, **more).fit(module, DataLoader(Numbered(19), 6))
    if isinstance(module, TogglingLate):  # the wrapper gave the other layer gradients of zeros
        assert module.with_gradient[:2] == [["net.0.weight", "net.0.bias"], [n for n, _ in module.named_parameters()]]
    return weights(module)


def _train_all() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case in CASES:
        found[case, "ddp"] = trained(case, DDPStrategy(**GLOBAL), 2)
        found[case, "uneven"] = trained(case, BalancedDDPStrategy([1, 3], timeout_s=120), 2)
    found["thawing", "two devices each"] = trained("thawing", DDPStrategy(devices_per_process=2, **GLOBAL), 4)
    found["growing", "two devices each"] = trained("growing", DDPStrategy(devices_per_process=2, **GLOBAL), 4)
    found["thawing", "two stages each"] = trained("thawing", DDPModelParallelStrategy(num_microbatches=2, **GLOBAL), 4)
    # torch's wrapper lost the gradients that a hook had replaced in its buckets
    found["editing", "views of buckets"] = trained("editing", DDPStrategy(gradient_as_bucket_view=True, **GLOBAL), 2)
    hook = Hook()
    found["plain", "own hook"] = trained("plain", DDPStrategy(**GLOBAL), 2, callbacks=[hook])
    assert hook.num_called == 8  # a bucket in each step
    for module in (Late(), TogglingLate()):
        options = {"find_unused_parameters": False} if isinstance(module, Late) else {"static_graph": True}
        with pytest.raises((ConfigError, RuntimeError)) as raised:
            quiet_trainer(DDPStrategy(**options, **GLOBAL), 2).fit(module, DataLoader(Numbered(), 6))
        found[type(module).__name__] = str(raised.value)
    return found


def test_ranks_reduce_what_is_frozen_unfrozen_and_added_as_one_device_trains_it() -> None:
    by_rank = run_ranks(_train_all, 2, timeout_s=300)
    single = {case: trained(case, SingleDeviceStrategy(), 1) for case in CASES}
    for found in by_rank:
        assert "unfrozen within training_step" in found.pop("Late")
        # the first backward pass was not reduced, and with toggled optimizers the weights were wrong
        assert "but in manual optimization the module runs any" in found.pop("TogglingLate")
        for (case, way), trained_weights in found.items():
            torch.testing.assert_close(trained_weights, single[case], rtol=0, atol=1e-10, msg=f"{case}, {way}")


class Initial(pl.Callback):
    """Copies the weights that a module has when a run is set up, as a lottery ticket does."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.weights = weights(pl_module)


class Unseeded(Net):
    """Has other weights on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", 0)))
        self.net[0].reset_parameters()


def _validate_unseeded(strategy: str) -> tuple[Tensor, float]:
    initial = Initial()
    trainer = trainer_of(strategy, callbacks=[initial])
    (values,) = trainer.validate(Unseeded(), DataLoader(Numbered(), 6), verbose=False)
    return initial.weights, values["val"]


def test_hooks_of_setup_and_evaluations_see_the_weights_of_rank_0() -> None:
    """`ModelPruning` reset weights to each rank's own; an evaluation was the mean over different modules."""
    assert_as_single(_validate_unseeded, "ddp", tolerance=1e-6)


SHARES = (3, 4, 0)  # samples of each rank; a rank without samples runs some other's with weight 0
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "rows": (nn.BatchNorm1d(4), (), {}),
    "sequences": (nn.BatchNorm1d(4, momentum=None), (5,), {}),
    "images": (nn.BatchNorm2d(4), (3, 2), {"memory_format": torch.channels_last}),
    "volumes": (nn.BatchNorm3d(4, affine=False, track_running_stats=False), (2, 2, 1), {}),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer, the whole batch, and what the loss weighs its output with."""
    layer, shape, options = LAYERS[name]
    layer = layer.double()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    batch = (10 + torch.randn(sum(SHARES), 4, *shape, dtype=torch.float64)).to(**options)
    return layer, batch, torch.randn_like(batch)


def gradients(layer: nn.Module, x: Tensor, factors: Tensor, weight: float = 1.0) -> dict[str, Tensor]:
    """Output, gradients, those of a penalty on the gradient, and what the layer tracks."""
    layer(x + 1)  # so that a cumulative average has two batches
    x = x.clone().requires_grad_()
    output = layer(x)
    inputs = [x, *layer.parameters()]
    loss = (output.square() * factors).sum() * weight
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    (penalized,) = torch.autograd.grad(loss, x, create_graph=True)
    second = torch.autograd.grad(penalized.square().sum() * weight, inputs)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    found = {f"first {name}": value for name, value in zip(names, first, strict=True)}
    found |= {f"second {name}": value for name, value in zip(names, second, strict=True)}
    return {"output": output.detach(), **found, **layer.state_dict()}


def _results() -> dict[str, dict[str, Tensor]]:
    rank, found = dist.get_rank(), {}
    for name in LAYERS:
        layer, batch, factors = made(name)
        SyncBatchNorm().apply(layer)
        x, own = batch.split(SHARES)[rank], factors.split(SHARES)[rank]
        if not SHARES[rank]:
            layer.counts, x, own = False, batch[:1] + 5, factors[:1]
        found[name] = gradients(layer, x, own, float(bool(SHARES[rank])))
    return found


def test_ranks_find_what_one_device_finds(ranks: list[Any]) -> None:
    for name in LAYERS:
        for key, value in gradients(*made(name)).items():
            found = [results[name][key] for results, _ in ranks]
            if key == "output" or key.endswith(" x"):
                found = [torch.cat(found[:-1])]  # the last rank's have weight 0
            elif key.startswith(("first", "second")):
                found = [torch.stack(found).sum(0)]  # DDP sums those of parameters
            for part in found:
                assert_same(part, value, 1e-10, f"{name}, {key}")


def _one_sample() -> str:
    layer = nn.BatchNorm1d(4)
    SyncBatchNorm().apply(layer)
    layer.counts = dist.get_rank() == 0
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        layer(torch.ones(1, 4))
    return str(error.value)


def test_one_value_per_channel_is_refused_on_every_rank_as_by_one_device(ranks: list[Any]) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        nn.BatchNorm1d(4)(torch.ones(1, 4))
    assert {message.partition(",")[0] for _, message in ranks} == {str(error.value).partition(",")[0]}


def _on_a_rank() -> Any:
    dist.init_process_group("gloo")
    return _results(), _one_sample()


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(_on_a_rank, len(SHARES))
