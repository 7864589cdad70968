"""Losses as people write them, and `evener.mean`: the whole batch's gradient in parts of [8, 1], [9, 0], [3, 3, 3]."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from regression import quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

import evener
from evener.strategies import BalancedDataParallelStrategy, SingleDeviceStrategy

NUM = 9
CUTS = ([8, 1], [9, 0], [3, 3, 3])
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
Batch = Any


class Net(pl.LightningModule):
    """One step of SGD, so that weights show gradients."""

    def __init__(self, loss: Callable[["Net", Batch], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale, self.shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.2))
        self.loss = loss
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self, SimpleNamespace(**batch))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def samples() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    found = {
        **{name: rand(NUM, 5) for name in ("x", "a")},
        "target": rand(NUM, 4),
        "y": torch.tensor([0, 1, 2, 3, 3, 0, 1, 2, 0]),
        "ignored": torch.tensor([0, 1, 2, 3, -100, 3, 1, -100, 0]),
        "mask": torch.tensor([0.2, 0.9, 0.0, 0.4, 0.7, 0.1, 0.0, 0.5, 0.3]).double(),
        "chosen": torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 0]).bool(),
        "sparse": torch.tensor([1, 0, 0, 2, 0, 1, 0, 0, 0]).bool(),
        "boxes": (rand(NUM, 4) > 1.0).double() * (torch.arange(NUM) % 3 == 0)[:, None],
    }
    return [{name: rows[i] for name, rows in found.items()} for i in range(NUM)]


def each(m: Net, b: Batch) -> Tensor:
    return F.cross_entropy(m(b.x), b.y, reduction="none")


def masked(m: Net, b: Batch) -> Tensor:
    return (m(b.x).pow(2).mean(1) * b.mask).sum() / b.mask.sum()


def focal(m: Net, b: Batch) -> Tensor:
    p = m(b.x).sigmoid()
    loss = F.binary_cross_entropy(p, b.boxes, reduction="none") * (p - b.boxes).abs().detach() ** 2
    return loss.sum() / b.boxes.sum().clamp(min=1)


def conditional(m: Net, b: Batch) -> Tensor:
    loss = F.cross_entropy(m(b.x), b.ignored)
    if b.sparse.any():
        loss = loss + 0.5 * m(b.x)[b.sparse].pow(2).mean()
    return loss


def per_class(m: Net, b: Batch) -> Tensor:
    hot = F.one_hot(b.y, 4).double()
    return ((m(b.x).pow(2) * hot).sum(0) / hot.sum(0)).mean()


FORMS: dict[str, Callable[[Net, Batch], Tensor]] = {
    "class weights": lambda m, b: F.cross_entropy(m(b.x), b.y, weight=CLASS_WEIGHTS),
    "ignored targets": lambda m, b: F.cross_entropy(m(b.x), b.ignored),
    "segmentation": lambda m, b: F.cross_entropy(
        m(b.x)[..., None, None], b.ignored[:, None, None], weight=CLASS_WEIGHTS
    ),
    "probabilities as targets": lambda m, b: F.cross_entropy(m(b.x), b.target.softmax(1)),
    "masked sum / mask.sum()": masked,
    "masked sum / count.clamp(1)": lambda m, b: (each(m, b) * b.sparse).sum() / b.sparse.sum().clamp(min=1),
    "focal / positives.clamp(1)": focal,
    "masked sum / (count + eps)": lambda m, b: (each(m, b) * b.chosen).sum() / (b.chosen.sum() + 1e-8),
    "masked sum / count.item()": lambda m, b: (each(m, b) * b.mask).sum() / b.mask.sum().item(),
    "masked sum / max(1, count.item())": lambda m, b: (each(m, b) * b.sparse).sum() / max(1, b.sparse.sum().item()),
    "masked sum / clamped.item()": lambda m, b: (each(m, b) * b.sparse).sum() / b.sparse.sum().clamp(min=1.0).item(),
    "sum / len": lambda m, b: F.cross_entropy(m(b.x), b.y, reduction="sum") / len(b.x),
    "sum / constant": lambda m, b: m(b.x).pow(2).sum() / 100,
    "sum": lambda m, b: m(b.x).pow(2).sum(),
    "mean + sum": lambda m, b: F.mse_loss(m(b.x), b.target) + 0.1 * m(b.a).pow(2).sum(),
    "sum and its hinge": lambda m, b: m(b.x).pow(2).sum() + (m(b.a).pow(2).sum() - 7).relu(),
    "chosen rows": lambda m, b: m(b.x)[b.chosen].mean(),
    "masked_select": lambda m, b: m(b.x).masked_select(b.target > 0).pow(2).mean(),
    "nanmean": lambda m, b: torch.where(b.target > 0, m(b.x).pow(2), torch.nan).nanmean(),
    "evener.mean": lambda m, b: evener.mean(each(m, b), weight=b.mask) + 0.1 * evener.mean(m(b.a).pow(2)),
    "per class": per_class,
    "bce with pos_weight": lambda m, b: F.binary_cross_entropy_with_logits(m(b.x), b.boxes, pos_weight=CLASS_WEIGHTS),
    "kl batchmean": lambda m, b: F.kl_div(m(b.x).log_softmax(1), b.target.softmax(1), reduction="batchmean"),
    "four terms": lambda m, b: F.cross_entropy(m(b.x), b.ignored, weight=CLASS_WEIGHTS) + 0.3 * masked(m, b)
    + 0.1 * m(b.x).abs().mean() + 0.2 * F.l1_loss(m(b.a)[b.chosen], b.target[b.chosen]),
    "uncertainty weighting": lambda m, b: torch.exp(-m.scale) * F.cross_entropy(m(b.x), b.ignored) + m.scale
    + torch.exp(-m.shift) * m(b.x).abs().mean() + m.shift,
    "weight decay by hand": lambda m, b: F.cross_entropy(m(b.x), b.ignored)
    + 0.01 * sum(p.pow(2).sum() for p in m.parameters()),
    "stack of terms": lambda m, b: torch.stack([F.cross_entropy(m(b.x), b.ignored), m(b.x).abs().mean()]).mean(),
    "conditional term": conditional,
}  # fmt: skip

FORMS |= {  # no means
    "root of a mean": lambda m, b: m(b.x).pow(2).mean().sqrt(),
    "dice": lambda m, b: 1 - 2 * (m(b.x).sigmoid() * b.boxes).sum() / (m(b.x).sigmoid().sum() + b.boxes.sum()),
    "product with itself": lambda m, b: (lambda loss: loss * loss.detach())(F.cross_entropy(m(b.x), b.ignored)),
    "(errors + penalty) / len": lambda m, b: (m(b.x).pow(2).sum() + m.body[0].weight.abs().sum()) / len(b.x),
}


def trained(loss: Callable[[Net, Batch], Tensor], strategy: Any, devices: int) -> list[Tensor]:
    """The weights, and the logged loss."""
    module = Net(loss)
    trainer = quiet_trainer(strategy, devices, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, DataLoader[Any](samples(), NUM))  # type: ignore[arg-type]
    return [weights(module), trainer.callback_metrics["loss"].double()]


def in_parts(loss: Callable[[Net, Batch], Tensor], sizes: list[int]) -> list[Tensor]:
    return trained(loss, BalancedDataParallelStrategy(weights=sizes, global_view=False), len(sizes))


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_in_parts_has_the_gradient_of_the_whole_batch(name: str) -> None:
    expected = trained(FORMS[name], SingleDeviceStrategy(), 1)
    for sizes in CUTS:
        found = in_parts(FORMS[name], sizes)
        tolerance = 1e-7 if "eps" in name else 1e-10  # each part adds it
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)  # logged in float32


VALUES = torch.tensor([[1.0, 2.0], [3.0, 10.0]], dtype=torch.float64)
HALF = torch.full((70_000,), 2.0, dtype=torch.float16)  # whose sum overflows


@pytest.mark.parametrize(
    ("values", "weight", "expected", "gradient"),
    [
        (VALUES, None, 4.0, [[0.25, 0.25], [0.25, 0.25]]),
        (VALUES, torch.tensor([[1, 0], [2, 1]]), (1 + 2 * 3 + 10) / 4, [[0.25, 0.0], [0.5, 0.25]]),
        (VALUES, torch.tensor([[True], [False]]), 1.5, [[0.5, 0.5], [0.0, 0.0]]),  # a weight per row
        (VALUES, torch.zeros(2), 0.0, [[0.0, 0.0], [0.0, 0.0]]),  # which counts nothing
        (VALUES[:0], None, 0.0, []),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 0.0]), 1.0, None),
        (torch.tensor([True, True, False, False]), None, 0.5, None),
        (HALF, torch.ones(70_000, dtype=torch.bool), 2.0, None),
    ],
)
def test_a_mean_divides_by_the_sum_of_its_weights(
    values: Tensor, weight: Tensor | None, expected: float, gradient: Any
) -> None:
    values = values.clone().requires_grad_(values.is_floating_point())
    loss = evener.mean(values, weight=weight)
    assert loss.item() == expected
    if values.requires_grad:
        loss.backward()
        assert values.grad is not None
        assert (loss.dtype, values.grad.dtype) == (values.dtype, values.dtype)
        assert gradient is None or values.grad.tolist() == gradient


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, requires_grad=True), r"weight requires a gradient.*Pass weight.detach\(\)"),
        (torch.ones(3), r"weight has shape \(3,\), which does not broadcast to that of values"),
    ],
)
def test_weights_that_cannot_be_honoured_are_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evener.mean(VALUES, weight=weight)
