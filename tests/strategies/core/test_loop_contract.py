"""The loop calls the contract in place of a strategy's methods; overridden methods are called as they are."""

from typing import Any

import pytorch_lightning.strategies as pl_strategies
import torch
from tiny import Tiny, quiet

from evener.strategies import DataParallelStrategy


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
    loader: Any = torch.utils.data.DataLoader(torch.ones(2, 1))  # type: ignore[arg-type]
    quiet(strategy=strategy).fit(Tiny(), loader)
    return strategy.calls


def test_the_loop_calls_the_contract_only_unless_a_method_is_overridden() -> None:
    assert calls_of(Doubling()) == ["double", "finish"] * 2
    assert calls_of(Again()) == ["backward", "double", "finish"] * 2
    assert calls_of(Lightnings()) == ["post_backward"] * 2


def test_a_method_patched_on_the_object_is_called() -> None:
    strategy = Doubling()
    own = strategy.backward
    strategy.backward = lambda *args, **kwargs: (strategy.calls.append("patched"), own(*args, **kwargs))[1]  # type: ignore[method-assign]
    assert calls_of(strategy) == ["patched", "double", "finish"] * 2
