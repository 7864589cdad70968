"""Autograd's graph shows whether a loss is the mean over samples, without a call of the module."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from evener.strategies.batch.checks._loss_graph import read_loss

NUM = 4
INPUTS = torch.linspace(-1, 1, NUM * 5).reshape(NUM, 5)
LABELS = torch.tensor([0, 1, 2, 1])
TARGETS = torch.zeros(NUM, 3)
VALUES = torch.tensor([0.5, 2.0, -1.0, 0.3])
NORMED = (VALUES - VALUES.mean()) / VALUES.std()
STEEP = torch.tensor([[0.5, 2.0, 1.0], [1.0, 7.0, 2.0], [-1.0, 3.0, 5.0], [0.0, 1.0, -2.0]])
STEPS = nn.LSTM(3, 2)
LOG_SCALE = nn.Parameter(torch.zeros(()))


class Frozen(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.requires_grad_(False)


class Whole(nn.Module):
    """A net beside the learned scale, and a buffer that has no memory of its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.scale = net, LOG_SCALE
        self.register_buffer("sparse", torch.eye(2).to_sparse())


def doubt(function: Callable[[Tensor], Tensor], net: nn.Module | None = None) -> str:
    net = net or nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return read_loss(function(net(INPUTS)), NUM, Whole(net)).doubt


def weight_decay(*parameters: Tensor) -> Tensor:
    return 1e-3 * sum((p.pow(2).sum() for p in parameters), start=torch.zeros(()))


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda z: F.cross_entropy(z, LABELS),
    "squares": lambda z: F.mse_loss(z, TARGETS),
    "absolute values": lambda z: F.l1_loss(z, TARGETS),
    "Huber": lambda z: F.huber_loss(z, TARGETS),
    "binary cross entropy": lambda z: F.binary_cross_entropy_with_logits(z, TARGETS),
    "Gaussian": lambda z: F.gaussian_nll_loss(z[:, 0], TARGETS[:, 0], z[:, 1].exp()),
    "norm of each": lambda z: z.norm(dim=1).mean(),
    "picked by class": lambda z: -z.log_softmax(-1).gather(1, LABELS[:, None]).mean(),
    "two terms": lambda z: 0.5 * F.mse_loss(z, TARGETS) + 3 * z.softmax(-1).square().sum(1).mean(),
    "mean of terms": lambda z: torch.stack([F.cross_entropy(z, LABELS), z.mean()]).mean(),
    "third of a sum": lambda z: (z.mean() + z.abs().mean() + F.cross_entropy(z, LABELS)) / 3,
    "learned scale": lambda z: torch.exp(-LOG_SCALE) * F.cross_entropy(z, LABELS) + LOG_SCALE,
    "mirrored features": lambda z: (z.flip(-1) - z.roll(1, 1)).square().mean(),
    "a number of a program": lambda z: (
        z.mean() / math.log(2) + 2**-10 * z.mean() + z.mean() / 1234567891 + z.mean() * (1 / 3) + 1e-3 * z.mean()
    ),
    "times balanced labels": lambda z: (z[:, 0] * torch.tensor([1.0, -1.0, -1.0, 1.0])).mean(),
    "times features centred in each sample": lambda z: (z * torch.tensor([-0.7, 0.2, 0.5])).mean(),
    "weight decay": lambda z: F.cross_entropy(z, LABELS) + weight_decay(LOG_SCALE),
}

OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sum": (lambda z: z.sum(), "Sum"),
    "sum by size": (lambda z: z.sum() / len(z), "Div"),
    "times size": (lambda z: z.mean() * len(z), "Mul"),
    "root": (lambda z: F.mse_loss(z, TARGETS).sqrt(), "Sqrt"),
    "ratio": (lambda z: z.mean() / z.abs().mean(), "Div"),
    "weights of classes": (lambda z: F.cross_entropy(z, LABELS, weight=torch.ones(3)), "NllLoss"),
    "ignored class": (lambda z: F.cross_entropy(z, LABELS, ignore_index=2), "NllLoss"),
    "padding": (lambda z: F.cross_entropy(z, torch.tensor([0, 1, -100, 1])), "NllLoss"),
    "masked": (lambda z: z[LABELS > 0].mean(), "Mean"),
    "contrastive": (lambda z: F.cross_entropy(z @ z.T, torch.arange(NUM)), "Mm"),
    "contrastive to fixed targets": (lambda z: F.cross_entropy(INPUTS[:, :3] @ z.T, torch.arange(NUM)), "Mm"),
    "contrastive by einsum": (lambda z: F.cross_entropy(torch.einsum("nc,kc->nk", z, z), torch.arange(NUM)), "Bmm"),
    "added products": (lambda z: torch.baddbmm(torch.zeros(1), z[None], z.T[None]).mean(), "Baddbmm"),
    "mirrored samples": (lambda z: (z - z.flip(0)).square().mean(), "Flip"),
    "next sample": (lambda z: (z - z.roll(1, 0)).square().mean(), "Roll"),
    "next element": (lambda z: (z - z.roll(1)).square().mean(), "Roll"),
    "pairs": (lambda z: (z[:, None] - z[None]).abs().mean(), "Sub"),
    "pairs with fixed ones": (lambda z: (z[:, None] - INPUTS[None, :, :3]).abs().mean(), "Sub"),
    "distances": (lambda z: torch.cdist(z, z).mean(), "Cdist"),
    "variance": (lambda z: z.std(0).mean(), "Mean"),
    "centred": (lambda z: (z - z.mean(0)).square().mean(), "Mean"),
    "softmax over samples": (lambda z: z.softmax(0).square().mean(), "Softmax"),
    "advantages that were centred": (lambda z: -(z[:, 0] * (VALUES - VALUES.mean())).mean(), "Mul"),
    "advantages in two terms": (
        lambda z: -torch.min(z[:, 0].exp() * NORMED, z[:, 0].exp().clamp(0.8, 1.2) * NORMED).mean() + z.mean(),
        "Mul",
    ),
    "targets that were centred": (lambda z: F.mse_loss(z, (STEEP - STEEP.mean(0)) / STEEP.std(0)), "MseLoss"),
    "times a number read from the batch": (lambda z: z.abs().mean().item() * z.mean(), "Mul"),
    "convolution over samples": (
        lambda z: F.conv1d(z.T[None], torch.ones(1, 3, 3), padding=1).square().mean(),
        "Convolution",
    ),
    "samples for steps": (lambda z: STEPS(z[:, None].expand(-1, 3, -1))[0][:, -1].square().mean(), "MkldnnRnn|Unbind"),
    "halves": (lambda z: (z[: NUM // 2] * z[NUM // 2 :]).mean(), "Mean"),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_seen(name: str) -> None:
    assert not doubt(MEANS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_no_mean_is_named(name: str) -> None:
    function, operation = OTHERS[name]
    assert re.match(f"({operation})(Layer)?Backward", doubt(function))


def squares(z: Tensor) -> Tensor:
    return F.mse_loss(z, torch.zeros_like(z))


def test_layers_that_keep_samples_apart_are_passed() -> None:
    encoder = nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)
    images = nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 2, 1), nn.MaxPool2d(1), nn.Flatten())
    sequence = nn.Sequential(nn.Linear(5, 18), nn.Unflatten(1, (3, 6)), encoder)
    frozen = nn.Sequential(nn.Linear(5, 7), Frozen(7, 6), nn.LayerNorm(6))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
    for net in (images, sequence, frozen, normed):
        assert not doubt(squares, net), net


class Attention(nn.MultiheadAttention):
    """Takes samples for the elements of one sequence."""

    needs_weights = True

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs, inputs, inputs, need_weights=self.needs_weights)[0]


def test_attention_over_samples_is_named() -> None:
    attention = Attention(6, 3)
    assert doubt(squares, nn.Sequential(nn.Linear(5, 6), attention)).startswith("Bmm")
    attention.needs_weights = False
    assert doubt(squares, nn.Sequential(nn.Linear(5, 6), attention)).startswith("ScaledDotProduct")


class Recurrent(nn.LSTM):
    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs[..., None])[1][0][-1]


def test_the_state_of_a_recurrent_layer_is_no_sample() -> None:
    assert not doubt(squares, Recurrent(1, 7, num_layers=3, batch_first=True))


def test_what_is_looked_up_by_the_batch_differs_between_samples() -> None:
    tokens, positions = torch.arange(NUM * 3).reshape(NUM, 3) % 5, torch.arange(3)
    net = nn.ModuleList([nn.Embedding(5, 6), nn.Embedding(3, 6), nn.Linear(6, 3)])
    features: Tensor = net[2](net[0](tokens) + net[1](positions))
    labels = (tokens.flatten() % 3).clone()
    assert not read_loss(F.cross_entropy(features.flatten(0, 1), labels), NUM, net).doubt
    assert read_loss(F.cross_entropy(features.flatten(0, 1), labels, ignore_index=0), NUM, net).doubt.startswith(
        "NllLoss"
    )
    assert read_loss(features.sum(), NUM, net).doubt.startswith("Sum")
    assert read_loss(net[1].weight[LABELS].sum(), NUM, net).doubt.startswith("Sum")
    assert not read_loss(net[1].weight[LABELS].square().mean(), NUM, net).doubt


PADDED = torch.tensor([[0, 1, 1, -100], [1, -100, -100, -100], [2, 2, 1, 0], [0, 1, -100, -100]])
"""Four samples of 3, 1, 4 and 2 targets."""
SHIFTED = torch.tensor([[0, 1, -100], [1, 2, -100], [2, 2, -100], [0, 1, -100]])
"""Two targets of each; what torch sees is a row of 12."""

UNEVEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "padding": (lambda z: F.cross_entropy(words(z, 4), PADDED.flatten()), "10 of 16 targets count"),
    "pictures": (lambda z: F.cross_entropy(words(z, 4).reshape(4, 4, 3).mT, PADDED), "10 of 16 targets count"),
    "ignored class": (lambda z: F.cross_entropy(z, LABELS, ignore_index=2), "3 of 4 targets count"),
    "weights of classes": (
        lambda z: F.cross_entropy(z, LABELS, weight=torch.tensor([1.0, 5.0, 3.0])),
        "4 of 4 targets count, by weights of classes",
    ),
    "two terms": (lambda z: z.square().mean() + F.cross_entropy(words(z, 4), PADDED.flatten()), "10 of 16"),
}

EVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda z: F.cross_entropy(words(z, 3), SHIFTED.flatten()),
    "shifted, steps of time first": lambda z: F.cross_entropy(words(z, 3), SHIFTED.mT.flatten()),
    "equal weights": lambda z: F.cross_entropy(z, LABELS, weight=torch.full((3,), 0.3)),
    "weights of one class": lambda z: F.cross_entropy(z, torch.ones_like(LABELS), weight=torch.tensor([1.0, 5.0, 3.0])),
    "times the targets that count": lambda z: F.cross_entropy(words(z, 4), PADDED.flatten()) * 10 / 16,
    "by the targets that do not": lambda z: F.cross_entropy(words(z, 4), PADDED.flatten()) / torch.tensor(1.6),
    "sum": lambda z: F.cross_entropy(words(z, 4), PADDED.flatten(), reduction="sum"),
    "nothing counts": lambda z: F.cross_entropy(z, torch.full_like(LABELS, -100)),
    "targets of the module": lambda z: F.cross_entropy(KEPT + z.mean(), KEPT_LABELS, ignore_index=0),
}

KEPT, KEPT_LABELS = nn.Parameter(torch.eye(4, 3)), LABELS.clone()


def words(z: Tensor, num: int) -> Tensor:
    """As many rows of three classes for each sample."""
    return z.repeat_interleave(num, 0)


def uneven(function: Callable[[Tensor], Tensor]) -> str:
    whole = Whole(nn.Linear(5, 3))
    whole.register_buffer("labels", KEPT_LABELS)
    return read_loss(function(whole.net(INPUTS)), NUM, whole).uneven


@pytest.mark.parametrize("name", UNEVEN)
def test_targets_that_count_more_of_some_samples_prove_that_a_loss_is_no_mean(name: str) -> None:
    function, told = UNEVEN[name]
    assert uneven(function).startswith(told)
    assert not read_loss(function(torch.ones(NUM, 3, requires_grad=True)), 1, nn.Module()).uneven  # of one sample


@pytest.mark.parametrize("name", EVEN)
def test_targets_that_may_count_alike_of_each_sample_prove_nothing(name: str) -> None:
    assert not uneven(EVEN[name])


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


def test_a_function_of_the_user_is_named_since_it_may_do_anything() -> None:
    assert doubt(lambda z: Half.apply(z).mean()) == "HalfBackward"


def test_recomputed_parts_are_not_computed_once_more() -> None:
    calls = list[int]()

    class Counts(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:  # type: ignore[override]
            calls.append(1)
            return super().forward(value).softmax(1)

    layer = Counts(5, 3)
    output: Any = checkpoint(layer, INPUTS, use_reentrant=False)
    assert not read_loss(F.cross_entropy(output, LABELS), NUM, Whole(layer)).doubt
    assert len(calls) == 1


def test_a_long_chain_is_followed() -> None:
    def chain(z: Tensor) -> Tensor:
        for _ in range(5_000):
            z = z * 0.999
        return z.mean()

    assert not doubt(chain)
