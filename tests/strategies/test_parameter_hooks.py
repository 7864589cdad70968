"""Hooks that users register on parameters see every part's gradient, once, whatever the strategy."""

import re
import warnings
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import Case, Net, assert_equal, baseline, run
from regression import Net as Regression
from regression import Numbered, quiet_trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader

from evener.strategies import (
    BalancedDataParallelStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)


class Hooked(Net):
    """Has hooks that clamp, collect, replace and write to gradients, that update a parameter, and that come later."""

    def __init__(self) -> None:
        super().__init__()
        self.collected = list[Tensor]()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.net[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
        self.net[0].bias.register_hook(self.collected.append)
        self.net[2].weight.register_hook(_limit)
        self.net[2].weight.register_post_accumulate_grad_hook(_clamp)
        self.net[2].bias.register_post_accumulate_grad_hook(_step).remove()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.current_epoch == 0:
            self.net[2].bias.register_hook(lambda gradient: gradient.sign())
            self.net[2].bias.register_post_accumulate_grad_hook(_step)

    def on_after_backward(self) -> None:
        """Leaves alone what the base class keeps: a parameter has no gradient once it is updated."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack(self.collected).norm()
        self.gradients.append(norm)
        self.net[0].bias.grad.add_(norm)  # type: ignore[union-attr]
        self.collected.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam would not notice a factor


def _limit(gradient: Tensor) -> None:
    gradient.clamp_(max=0.005)


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def _step(parameter: Tensor) -> None:
    """Update a parameter in the backward pass, by its own rate."""
    assert parameter.grad is not None
    parameter -= 0.3 * parameter.grad
    parameter.grad = None


class Scaled(Regression):
    """Its first weight learns three times as fast."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(module: Regression, strategy: Any, devices: int) -> Tensor:
    quiet_trainer(strategy, devices, limit_val_batches=0).fit(module, DataLoader(Numbered(), 6))
    return weights(module)


class ScaledLate(Scaled):
    """As `Scaled`, with hooks that come when training starts, and one that sees what is accumulated."""

    def on_train_start(self) -> None:
        self.net[0].bias.register_hook(lambda gradient: gradient * 5).remove()
        self.net[2].bias.register_hook(lambda gradient: gradient * 3)
        self.net[2].weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _train_all() -> dict[str, Tensor]:
    two_each = {"batch_size_is": "global", "timeout_s": 20}
    return {
        "Scaled, replicas": trained(Scaled(), DDPStrategy(devices_per_process=2, **two_each), 4),  # type: ignore[arg-type]
        "Scaled, stages": trained(Scaled(), DDPModelParallelStrategy(num_microbatches=2, **two_each), 4),
        **{
            f"{cls.__name__}, {shard}": trained(cls(), FSDPStrategy(shard, **two_each), 2)  # type: ignore[arg-type]
            for cls in (Scaled, ScaledLate)
            for shard in ("auto", [])
        },
    }


def test_ranks_call_hooks_once() -> None:
    by_rank = run_ranks(_train_all, 2, timeout_s=300)
    single = {cls.__name__: trained(cls(), SingleDeviceStrategy(), 1) for cls in (Scaled, ScaledLate)}
    for found in by_rank:
        for name, trained_weights in found.items():
            torch.testing.assert_close(trained_weights, single[name.split(",")[0]], rtol=0, atol=1e-10, msg=name)


IN_ONE_PROCESS: dict[str, Any] = {
    "dp": DataParallelStrategy,
    "unequal": lambda: BalancedDataParallelStrategy(weights=[1, 2]),
    "micro-batches": lambda: ModelParallelStrategy(num_microbatches=2),
}


@pytest.mark.parametrize("strategy", IN_ONE_PROCESS)
def test_gradients_of_one_process_are_the_whole_batchs_to_hooks(strategy: str) -> None:
    # Under dp they saw each replica's: a hook that collects gradients had those of the first chunk, and of the others.
    case = Case(Hooked, num=22, trainer={"accumulate_grad_batches": 2})
    assert_equal(run(case, IN_ONE_PROCESS[strategy](), devices=2), baseline(case), 1e-10)


HOOKS: dict[str, Any] = {
    "mask": lambda gradient: gradient * (torch.arange(len(gradient)) % 2)[:, None],
    "in place": lambda gradient: gradient.mul_(0.5),
    "finite": torch.nan_to_num,
    "clamp": lambda gradient: gradient.clamp(-0.1, 0.1),
    "norm": lambda gradient: gradient / gradient.norm(),
}
REFUSED = {"clamp", "norm"}


def _told(strategy: str, name: str) -> tuple[int, str]:
    """The steps that were taken, and the refusal or the warning."""
    made = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[strategy](batch_size_is="global", timeout_s=20, global_view=False)
    module = Regression()
    module.net[0].weight.register_hook(HOOKS[name])
    trainer = quiet_trainer(made, 2, limit_val_batches=0, max_steps=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(Numbered(), 6))
        except ConfigError as exc:
            return trainer.global_step, str(exc)
    return trainer.global_step, next((str(one.message) for one in seen if "a hook on the" in str(one.message)), "")


def _all_told(strategy: str) -> dict[str, tuple[int, str]]:
    return {name: _told(strategy, name) for name in HOOKS}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_hooks_that_make_something_else_of_a_ranks_gradient_are_refused(strategy: str) -> None:
    # Cause: they get each rank's gradient, and what clamps it, or collects it, had that without a word.
    for rank, found in enumerate(run_ranks(_all_told, 2, strategy)):
        for name, (num_steps, told) in found.items():
            refused = re.match(rf"{strategy}: computed in ranks of .* the gradient of net\.0\.weight", told) is not None
            assert (num_steps, refused, bool(told)) == ((0, True, True) if name in REFUSED else (2, False, False)), rank
