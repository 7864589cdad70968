"""Exact accumulation, by hand: the model is y = w·x, so that a mean loss has the mean x as its gradient."""

from typing import Any

import pytest
import torch
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

from evener.strategies import ConfigError


class Slope(Tiny):
    """Notes the gradient with which each optimizer step is taken."""

    def __init__(self, weights: tuple[Any, ...] = (), skipped: int = -1) -> None:
        super().__init__()
        del self.layer
        self.w = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.weights, self.skipped = weights, skipped
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.skipped:
            return None
        loss = (self.w * batch).mean()
        return {"loss": loss, "loss_weight": self.weights[batch_idx]} if self.weights else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.gradients.append(self.w.grad.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(rows: list[list[float]]) -> DataLoader[Any]:
    return DataLoader([torch.tensor(row, dtype=torch.float64) for row in rows], batch_size=None)  # type: ignore[arg-type]


TEN = [[float(i)] for i in range(1, 11)]
BY_HAND: dict[str, tuple[Slope, list[list[float]], int, list[float]]] = {
    "a short tail is the mean of its two": (Slope(), TEN, 4, [2.5, 6.5, 9.5]),
    "micro-batches weigh by samples": (Slope(), [[1, 2, 3], [7], [4, 6]], 2, [(1 + 2 + 3 + 7) / 4, 5]),
    "a loss weight counts instead": (Slope((10.0, 30.0)), [[1, 3], [4]], 2, [(10 * 2 + 30 * 4) / 40]),
    "a weight may be a tensor": (Slope((torch.tensor(1.0), torch.tensor(3.0))), [[2], [6]], 2, [5]),
    "weights may be zero": (Slope((0.0, 0.0)), [[2], [6]], 2, [0]),
    "a skipped one has no weight": (Slope(skipped=1), [[1], [2], [3]], 3, [2]),
    "a skipped last one has none either": (Slope(skipped=2), [[1], [3], [9]], 3, [2]),
}
"""A module, batches, how many of them make a step, and the gradients of the steps."""


# Lightning's own code runs the steps of a run that is profiled
@pytest.mark.parametrize("options", [{}, {"profiler": "simple"}], ids=["lean", "Lightning's loop"])
@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # Lightning's word on it
def test_gradients_of_exact_accumulation_are_those_by_hand(name: str, options: dict[str, Any]) -> None:
    module, rows, num, expected = BY_HAND[name]
    module.gradients = []
    quiet(accumulate_grad_batches=num, exact_accumulation=True, **options).fit(module, batches(rows))
    assert module.gradients == pytest.approx(expected, abs=1e-12)


def test_without_it_lightnings_rule_stays() -> None:
    quiet(accumulate_grad_batches=4).fit(module := Slope(), batches(TEN))
    assert module.gradients == pytest.approx([2.5, 6.5, 4.75], abs=1e-12)


def test_clipping_sees_the_mean_and_hooks_the_plain_loss() -> None:
    class Watched(Slope):
        clipped, losses = 0.0, ()

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)
            self.clipped = self.w.grad.item()  # type: ignore[union-attr]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses = (*self.losses, outputs["loss"].item())

    module = Watched()
    options = {"accumulate_grad_batches": 2, "exact_accumulation": True, "gradient_clip_val": 1.25}
    quiet(**options).fit(module, batches([[1, 2, 3], [7]]))
    assert module.gradients == [13 / 4]
    assert module.clipped == pytest.approx(1.25, rel=1e-5)  # torch adds 1e-6 to the norm that it divides by
    assert module.losses == (2.0, 7.0)


class TwoCalls(torch.optim.SGD):
    """Calls its closure twice per step."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Opaque(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * 1.0


class Again(Slope):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("module", "data", "told"),
    [
        (Opaque(), DataLoader(["one", "two"], batch_size=None), r'Return \{"loss": loss, "loss_weight": n\}'),  # type: ignore[arg-type]
        # the last micro-batch was added to gradients already divided, and ranks weighted it in another way
        (Again(TwoCalls), batches(TEN), "TwoCalls calls its closure again within a step"),
        (Again(torch.optim.LBFGS), batches(TEN), "LBFGS calls its closure again within a step"),
    ],
)
def test_what_can_not_be_accumulated_exactly_is_refused(module: Slope, data: Any, told: str) -> None:
    trainer = quiet(exact_accumulation=True, accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match=told):
        trainer.fit(module, data)
    assert trainer.global_step == 0
