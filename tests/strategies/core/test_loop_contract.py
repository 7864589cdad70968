"""The loop calls the contract in place of a strategy's methods; overridden methods are called as they are."""

from typing import Any

import pytest
import pytorch_lightning.strategies as pl_strategies
import torch
import torch.distributed as dist
from recording import SmallModule, loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.strategies import DataParallelStrategy
from evener.strategies.ranks.gradient_sync import forward_through
from evener.trainer import Trainer


class Doubling(DataParallelStrategy):
    """Doubles the loss, and tells what is called."""

    def __init__(self) -> None:
        super().__init__(devices=["cpu"])
        self.calls: list[str] = []

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls.append("double")
        return 2 * loss

    def finish_backward(self) -> None:
        self.calls.append("finish")


class Again(Doubling):
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append("backward")
        return super().backward(closure_loss, *args, **kwargs)


class Lightnings(pl_strategies.SingleDeviceStrategy):
    """A strategy of Lightning's, which does not know the contract."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        self.calls.append("post_backward")


def calls_of(strategy: Any) -> list[str]:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=strategy, max_steps=2, max_epochs=1, enable_model_summary=False, **options)
    trainer.fit(SmallModule(), loader(), loader())
    return strategy.calls


def test_the_loop_calls_the_contract_only() -> None:
    assert calls_of(Doubling()) == ["double", "finish"] * 2


def test_a_method_overridden_again_is_called() -> None:
    assert calls_of(Again()) == ["backward", "double", "finish"] * 2


def test_a_method_patched_on_the_object_is_called() -> None:
    strategy = Doubling()
    own = strategy.backward
    strategy.backward = lambda *args, **kwargs: (strategy.calls.append("patched"), own(*args, **kwargs))[1]  # type: ignore[method-assign]
    assert calls_of(strategy) == ["patched", "double", "finish"] * 2


def test_another_strategy_is_called_as_lightning_calls_it() -> None:
    assert calls_of(Lightnings()) == ["post_backward"] * 2


class Stepping(nn.Module):
    """A module with a step, as a LightningModule has, and a hook on its forward."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.automatic_optimization = automatic
        self.seen: list[Any] = []
        self.register_forward_hook(lambda module, args, output: self.seen.append(args))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def step(self, x: torch.Tensor, add: float) -> torch.Tensor:
        if add < 0:
            raise ValueError(add)
        return self(x).sum() + add


@pytest.mark.parametrize("automatic", [True, False])
def test_a_step_runs_in_the_place_of_the_wrapped_forward_and_may_call_it(automatic: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inner, x = Stepping(automatic), torch.ones(3, 2)
        wrapper = DistributedDataParallel(inner)
        with pytest.raises(ValueError, match="-1"):
            forward_through(wrapper, inner.step, x, add=-1)
        loss = forward_through(wrapper, inner.step, x, add=2)
        assert torch.allclose(loss, inner.layer(x).sum() + 2)
        assert len(inner.seen) == 1  # the step's own call, as on one device
        assert vars(inner).keys() == vars(Stepping(automatic)).keys()
        assert wrapper.require_backward_grad_sync
        assert wrapper.require_forward_param_sync is automatic  # in manual optimization each backward prepares its own
    finally:
        dist.destroy_process_group()
