"""What a strategy adds to Lightning's methods reaches the loop, and a subclass's own methods are called as they are."""

from typing import Any

import pytest
import torch
from recording import SmallModule, loader
from torch import nn

from evener.strategies import SingleDeviceStrategy
from evener.strategies.core.loop_contract import Additions, additions, adds
from evener.strategies.distributed.wrapper import forward_through
from evener.trainer import Trainer


class Doubling(SingleDeviceStrategy):
    """Doubles the loss, and tells what is called."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.calls: list[str] = []

    @adds(first="double", then="finish")
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append("backward")
        loss = super().backward(self.double(closure_loss), *args, **kwargs)
        self.finish()
        return loss

    def double(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls.append("double")
        return 2 * loss

    def finish(self) -> None:
        self.calls.append("finish")


class Again(Doubling):
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().backward(closure_loss, *args, **kwargs)


def calls_of(strategy: Doubling) -> list[str]:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=strategy, max_steps=2, max_epochs=1, enable_model_summary=False, **options)
    trainer.fit(SmallModule(), loader(), loader())
    return strategy.calls


def test_the_loop_calls_what_was_added_only() -> None:
    assert calls_of(Doubling()) == ["double", "finish"] * 2


def test_a_method_overridden_again_is_called() -> None:
    assert calls_of(Again()) == ["backward", "double", "finish"] * 2


def test_a_method_patched_on_the_object_may_do_anything() -> None:
    strategy, lightnings = Doubling(), SingleDeviceStrategy.backward
    assert additions(strategy, "backward", lightnings) == Additions("double", "finish")
    assert additions(strategy, "optimizer_step", SingleDeviceStrategy.optimizer_step) == Additions()
    strategy.backward = lambda *_: None  # type: ignore[method-assign, assignment]
    assert additions(strategy, "backward", lightnings) is None


class Counting(nn.Module):
    """A wrapper, as DDP is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.num = module, 0

    def forward(self, x: int) -> Any:
        self.num += 1
        if x < 0:
            raise ValueError(x)
        return self.module(x)


class Inner(nn.Module):
    def forward(self, x: int) -> int:
        return 10 * x

    def step(self, x: int) -> int:
        return self(x) + 1


def test_a_step_runs_inside_the_wrappers_forward_and_may_call_its_own() -> None:
    inner = Inner()
    wrapper = Counting(inner)
    assert forward_through(wrapper, inner, inner.step, 3) == 31
    assert wrapper.num == 1
    with pytest.raises(ValueError, match="-1"):
        forward_through(wrapper, inner, inner.step, -1)
    assert inner(2) == 20
    assert "forward" not in vars(inner)
