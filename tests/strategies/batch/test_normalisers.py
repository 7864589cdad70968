"""Losses as people write them have the whole batch's gradient in parts of [5, 4], [8, 1], [9, 0] and [3, 3, 3]."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evener
from evener.strategies.batch.exact.plans import OF_SAMPLES, Part, Plan, proposals
from evener.strategies.batch.exact.values import RETURNED, Comparison, Program, Seen, Tape

NUM = 9
CUTS = ([5, 4], [8, 1], [9, 0], [3, 3, 3])
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale, self.shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.2))
        self.conv = nn.Conv2d(5, 4, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Batch(dict[str, Tensor]):
    def __len__(self) -> int:
        return len(self["x"])

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


def batch() -> Batch:
    g = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731  # nine short lines of it
    found = Batch(
        x=rand(NUM, 5), a=rand(NUM, 5), words=rand(NUM, 6, 5), image=rand(NUM, 5, 3, 3), target=rand(NUM, 4),
        y=torch.tensor([0, 1, 2, 3, 3, 0, 1, 2, 0]), ignored=torch.tensor([0, 1, 2, 3, -100, 3, 1, -100, 0]),
        tokens=torch.randint(0, 4, (NUM, 6), generator=g), pixels=torch.randint(-1, 4, (NUM, 3, 3), generator=g),
        mask=torch.tensor([0.2, 0.9, 0.0, 0.4, 0.7, 0.1, 0.0, 0.5, 0.3]).double(),
        chosen=torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 0]).bool(),
        sparse=torch.tensor([1, 0, 0, 2, 0, 1, 0, 0, 0]).bool(),
        lengths=torch.tensor([6, 3, 2, 5, 6, 1, 4, 2, 3]), weights=torch.rand(NUM, generator=g).double() + 0.1,
        labels=torch.randint(1, 4, (NUM, 3), generator=g), label_lengths=torch.tensor([1, 2, 1, 1, 2, 1, 2, 1, 1]),
    )  # fmt: skip
    found["tokens"][torch.rand(NUM, 6, generator=g) < 0.4] = -100
    found["boxes"] = (rand(NUM, 4) > 1.0).double() * (torch.arange(NUM) % 3 == 0)[:, None]
    return found


def each(m: Net, b: Batch) -> Tensor:
    return F.cross_entropy(m(b.x), b.y, reduction="none")


def masked(m: Net, b: Batch) -> Tensor:
    return (m(b.x).pow(2).mean(1) * b.mask).sum() / b.mask.sum()


def focal(m: Net, b: Batch) -> Tensor:
    p = m(b.x).sigmoid()
    loss = F.binary_cross_entropy(p, b.boxes, reduction="none") * (p - b.boxes).abs().detach() ** 2
    return loss.sum() / b.boxes.sum().clamp(min=1)


def ctc(m: Net, b: Batch) -> Tensor:
    probabilities = m(b.words).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(probabilities, b.labels, torch.full((len(b),), 6), b.label_lengths)


def conditional(m: Net, b: Batch) -> Tensor:
    loss = F.cross_entropy(m(b.x), b.ignored)
    if b.sparse.any():
        loss = loss + 0.5 * m(b.x)[b.sparse].pow(2).mean()
    return loss


def per_class(m: Net, b: Batch) -> Tensor:
    hot = F.one_hot(b.y, 4).double()
    return ((m(b.x).pow(2) * hot).sum(0) / hot.sum(0)).mean()


FORMS: dict[str, Callable[[Net, Batch], Tensor]] = {
    "cross entropy": lambda m, b: F.cross_entropy(m(b.x), b.y),
    "class weights": lambda m, b: F.cross_entropy(m(b.x), b.y, weight=CLASS_WEIGHTS),
    "ignored targets": lambda m, b: F.cross_entropy(m(b.x), b.ignored),
    "smoothing, weights, ignored": lambda m, b: F.cross_entropy(
        m(b.x), b.ignored, weight=CLASS_WEIGHTS, label_smoothing=0.1
    ),
    "probabilities as targets": lambda m, b: F.cross_entropy(m(b.x), b.target.softmax(1)),
    "padded language model": lambda m, b: F.cross_entropy(m(b.words).flatten(0, 1), b.tokens.flatten()),
    "segmentation": lambda m, b: F.cross_entropy(m.conv(b.image), b.pixels, weight=CLASS_WEIGHTS, ignore_index=-1),
    "masked sum / mask.sum()": masked,
    "masked sum / count.clamp(1)": lambda m, b: (each(m, b) * b.sparse).sum() / b.sparse.sum().clamp(min=1),
    "focal / positives.clamp(1)": focal,
    "masked sum / (count + eps)": lambda m, b: (each(m, b) * b.chosen).sum() / (b.chosen.sum() + 1e-8),
    "masked sum / count.item()": lambda m, b: (each(m, b) * b.mask).sum() / b.mask.sum().item(),
    "sum / len": lambda m, b: F.cross_entropy(m(b.x), b.y, reduction="sum") / len(b),
    "sum / constant": lambda m, b: m(b.x).pow(2).sum() / 100,
    "sum": lambda m, b: m(b.x).pow(2).sum(),
    "mean + sum": lambda m, b: F.mse_loss(m(b.x), b.target) + 0.1 * m(b.a).pow(2).sum(),
    "sum + weight decay by hand": lambda m, b: m(b.x).pow(2).sum() + m.scale.detach() * m.body[0].weight.pow(2).sum(),
    "sum and its hinge": lambda m, b: m(b.x).pow(2).sum() + (m(b.a).pow(2).sum() - 7).relu(),
    "chosen rows": lambda m, b: m(b.x)[b.chosen].mean(),
    "masked_select": lambda m, b: m(b.x).masked_select(b.target > 0).pow(2).mean(),
    "nanmean": lambda m, b: torch.where(b.target > 0, m(b.x).pow(2), torch.nan).nanmean(),
    "evener.mean": lambda m, b: evener.mean(each(m, b), weight=b.mask) + 0.1 * evener.mean(m(b.a).pow(2)),
    "weights by dot": lambda m, b: torch.dot(b.weights, m(b.x).pow(2).mean(1)) / b.weights.sum(),
    "per class": per_class,
    "bce with pos_weight": lambda m, b: F.binary_cross_entropy_with_logits(m(b.x), b.boxes, pos_weight=CLASS_WEIGHTS),
    "kl batchmean": lambda m, b: F.kl_div(m(b.x).log_softmax(1), b.target.softmax(1), reduction="batchmean"),
    "ctc": ctc,
    "triplet": lambda m, b: F.triplet_margin_loss(m(b.x), m(b.a), b.target),
    "four terms": lambda m, b: F.cross_entropy(m(b.x), b.ignored, weight=CLASS_WEIGHTS) + 0.3 * masked(m, b)
    + 0.1 * m(b.x).abs().mean() + 0.2 * F.l1_loss(m(b.a)[b.chosen], b.target[b.chosen]),
    "uncertainty weighting": lambda m, b: torch.exp(-m.scale) * F.cross_entropy(m(b.x), b.ignored) + m.scale
    + torch.exp(-m.shift) * m(b.x).abs().mean() + m.shift,
    "weight decay by hand": lambda m, b: F.cross_entropy(m(b.x), b.ignored)
    + 0.01 * sum(p.pow(2).sum() for p in m.parameters()),
    "stack of terms": lambda m, b: torch.stack([F.cross_entropy(m(b.x), b.ignored), m(b.x).abs().mean()]).mean(),
    "mean of losses of samples": lambda m, b: torch.stack(
        [m(x[:n]).pow(2).mean() for x, n in zip(b.words, b.lengths, strict=True)]
    ).mean(),
    "conditional term": conditional,
    "GradScaler": lambda m, b: (F.cross_entropy(m(b.x), b.ignored) + masked(m, b)) * torch.tensor(1024.0),
    "detached parameter": lambda m, b: m.scale.detach() * F.cross_entropy(m(b.x), b.ignored),
}  # fmt: skip

FORMS |= {  # no means
    "root of a mean": lambda m, b: m(b.x).pow(2).mean().sqrt(),
    "dice": lambda m, b: 1 - 2 * (m(b.x).sigmoid() * b.boxes).sum() / (m(b.x).sigmoid().sum() + b.boxes.sum()),
    "product with itself": lambda m, b: (lambda loss: loss * loss.detach())(F.cross_entropy(m(b.x), b.ignored)),
    "(errors + penalty) / len": lambda m, b: (m(b.x).pow(2).sum() + m.body[0].weight.abs().sum()) / len(b),
}

OVER_SAMPLES: dict[str, Callable[[Net, Batch], Tensor]] = {
    "all pairs": lambda m, b: F.cross_entropy(m(b.x) @ m(b.a).T, torch.arange(len(b))),
    "variance": lambda m, b: m(b.x).var(0, correction=0).mean(),
}


class Unfit(Exception):
    """No plan has the whole batch's gradients."""


def part_of(m: Net, loss: Callable[[Net, Batch], Tensor], b: Batch, plan: Plan) -> Part:
    with Tape({RETURNED: plan.program or Program((), ())}) as tape:
        value = loss(m, b)
    return Part(value, plan, len(b), tape)


def in_parts(m: Net, loss: Callable[[Net, Batch], Tensor], parts: Sequence[Batch], plan: Plan) -> list[Tensor]:
    """The gradients, and the value, of a batch in parts."""
    found = [part_of(m, loss, b, plan) for b in parts]
    weights = [float(part.weight) for part in found]
    shares = [weight / sum(weights) for weight in weights]
    for part, share in zip(found if plan.needs_all else (), shares, strict=False):
        part.scale(part.program.merged([one.rows for one in found]), share)
    total = [torch.zeros_like(p) for p in m.parameters()] + [torch.zeros((), dtype=torch.float64)]
    for value, share in ((part.loss, share) for part, share in zip(found, shares, strict=True) if share):
        weighed = value * share
        for one, gradient in zip(
            total, torch.autograd.grad(weighed, [*m.parameters()], allow_unused=True), strict=False
        ):
            one += 0 if gradient is None else gradient
        total[-1] += weighed.detach()
    if plan.needs_all:
        program = found[0].program
        total[-1] = program.value(program.merged([part.rows for part in found]))
    return total


def whole(m: Net, loss: Callable[[Net, Batch], Tensor], b: Batch) -> list[Tensor]:
    value = loss(m, b)
    found = torch.autograd.grad(value, [*m.parameters()], allow_unused=True, materialize_grads=True)
    return [*found, value.detach()]


def cut(b: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Parts of these sizes, but for empty ones: they count for nothing."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [Batch({k: v[i:j] for k, v in b.items()}) for i, j in pairwise(ends) if j > i]


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def seen(m: Net, loss: Callable[[Net, Batch], Tensor], b: Batch) -> Seen:
    with Tape() as tape:
        value = loss(m, b)
    tape.log(RETURNED, value)
    return Seen(len(b), tape)


def plan_of(m: Net, loss: Callable[[Net, Batch], Tensor], b: Batch) -> Plan:
    """The first plan that has the whole's gradients in three parts of eight samples."""
    b = cut(b, [8, 1])[0]
    parts, expected = cut(b, [4, 3, 1]), whole(m, loss, b)
    for plan in proposals(Comparison(seen(m, loss, b), [seen(m, loss, part) for part in parts])):
        if difference(in_parts(m, loss, parts, plan)[:-1], expected[:-1]) < 1e-8:
            return plan
    raise Unfit


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_in_parts_has_the_gradient_of_the_whole_batch(net: Net, name: str) -> None:
    b, loss = batch(), FORMS[name]
    plan, expected = plan_of(net, loss, b), whole(net, loss, b)
    assert max(float(gradient.abs().max()) for gradient in expected[:-1]) > 1e-6
    found = {str(sizes): in_parts(net, loss, cut(b, sizes), plan) for sizes in CUTS}
    tolerance = 1e-7 if "eps" in name else 1e-10  # each part adds it
    assert max(difference(one, expected) for one in found.values()) < tolerance


@pytest.mark.parametrize("name", OVER_SAMPLES)
def test_a_function_that_compares_samples_has_no_plan(net: Net, name: str) -> None:
    with pytest.raises(Unfit):
        plan_of(net, OVER_SAMPLES[name], batch())


def test_a_mean_over_samples_needs_nothing_in_a_step(net: Net) -> None:
    plain = [name for name in FORMS if plan_of(net, FORMS[name], batch()) == OF_SAMPLES]
    assert {"cross entropy", "sum / len", "kl batchmean", "bce with pos_weight", "triplet"} <= set(plain)
    assert not {"class weights", "ignored targets", "padded language model", "four terms", "sum"} & set(plain)
