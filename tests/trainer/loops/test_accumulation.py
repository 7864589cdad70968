"""Exact accumulation, by hand: the model is y = w·x, so that a mean loss has the mean x as its gradient."""

from typing import Any

import pytest
import torch
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

from evener.strategies import ConfigError


class Slope(Tiny):
    """Notes the gradient with which each optimizer step is taken."""

    def __init__(self, weights: dict[int, float] | None = None, skipped: int = -1) -> None:
        super().__init__()
        del self.layer
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.weights, self.skipped = weights, skipped
        self.gradients: list[float] = []
        self.outputs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.skipped:
            return None
        loss = (self.w * batch).mean()
        return loss if self.weights is None else {"loss": loss, "loss_weight": self.weights[batch_idx]}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.gradients.append(self.w.grad.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(*rows: list[float]) -> DataLoader[Any]:
    return ready([torch.tensor(row, dtype=torch.float64) for row in rows])


def ready(data: list[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def gradients(module: Slope, data: DataLoader[Any], **options: Any) -> list[float]:
    quiet(**options).fit(module, data)
    return module.gradients


def exact(module: Slope, data: DataLoader[Any], num: int, **options: Any) -> list[float]:
    return gradients(module, data, accumulate_grad_batches=num, exact_accumulation=True, **options)


TEN = batches(*([float(i)] for i in range(1, 11)))


# Lightning's own code runs the steps of a run that is profiled
EITHER_LOOP = pytest.mark.parametrize("options", [{}, {"profiler": "simple"}])


@EITHER_LOOP
def test_short_tail_is_the_mean_of_its_two(options: dict[str, Any]) -> None:
    found = exact(Slope(), TEN, 4, **options)
    assert found == pytest.approx([2.5, 6.5, 9.5], abs=1e-12)  # means of 1 2 3 4, of 5 6 7 8, of 9 10


def test_without_it_lightnings_rule_stays() -> None:
    assert gradients(Slope(), TEN, accumulate_grad_batches=4) == pytest.approx([2.5, 6.5, 4.75], abs=1e-12)


@EITHER_LOOP
def test_ragged_micro_batches_weigh_by_samples(options: dict[str, Any]) -> None:
    data = batches([1, 2, 3], [7], [4, 6])
    assert exact(Slope(), data, 2, **options) == pytest.approx([13 / 4, 5.0], abs=1e-12)  # (1+2+3+7)/4, then (4+6)/2


@EITHER_LOOP
def test_a_loss_weight_counts_instead_of_samples(options: dict[str, Any]) -> None:
    module = Slope(weights={0: 10.0, 1: 30.0})
    assert exact(module, batches([1, 3], [4]), 2, **options) == pytest.approx([(10 * 2 + 30 * 4) / 40], abs=1e-12)


@pytest.mark.parametrize(("first", "second", "mean"), [(torch.tensor(1.0), torch.tensor(3.0), 5.0), (0.0, 0.0, 0.0)])
def test_a_weight_may_be_a_tensor_and_zero(first: Any, second: Any, mean: float) -> None:
    module = Slope(weights={0: first, 1: second})
    assert exact(module, batches([2.0], [6.0]), 2) == pytest.approx([mean], abs=1e-12)


# Lightning says so once where a training step returns None
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_micro_batch_has_no_weight() -> None:
    found = exact(Slope(skipped=1), batches([1.0], [2.0], [3.0]), 3)
    assert found == pytest.approx([2.0], abs=1e-12)  # mean of 1 and 3


def test_clipping_sees_the_mean_and_hooks_the_plain_loss() -> None:
    class Watched(Slope):
        clipped: float = 0.0

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)
            self.clipped = self.w.grad.item()  # type: ignore[union-attr]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.outputs.append(outputs["loss"].item())

    module = Watched()
    torch.nn.init.ones_(module.w)
    assert exact(module, batches([1, 2, 3], [7]), 2, gradient_clip_val=1.25) == [13 / 4]
    assert module.clipped == pytest.approx(1.25, rel=1e-5)  # torch adds 1e-6 to the norm that it divides by
    assert module.outputs == [2.0, 7.0]


def test_a_batch_without_a_countable_tensor_is_refused() -> None:
    class Opaque(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.w * 1.0

    with pytest.raises(ConfigError, match=r'Return \{"loss": loss, "loss_weight": n\}'):
        exact(Opaque(), ready(["one", "two"]), 2)


class TwoCalls(torch.optim.SGD):
    """Calls its closure twice per step."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [TwoCalls, torch.optim.LBFGS])
def test_an_optimizer_that_calls_its_closure_again_is_refused(optimizer: Any) -> None:
    """Cause: the last micro-batch was added to gradients already divided, and ranks weighted it in another way."""

    class Again(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.w * batch - 1).square().mean()

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.1)

    exact(Again(), batches([1.0, 2.0]), 2)  # a group of one micro-batch is computed anew
    trainer = quiet(exact_accumulation=True, accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match=f"{optimizer.__name__} calls its closure again within a step"):
        trainer.fit(Again(), batches([1.0, 2.0], [3.0], [4.0]))
    assert trainer.global_step == 0
