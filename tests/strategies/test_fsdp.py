"""FSDP trains as one device does, with a part of everything on each rank."""

from functools import partial
from itertools import chain
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks
from regression import NUM_SAMPLES, Net, Numbered, fit, fit_all, outcome, quiet_trainer, weights
from torch.func import functional_call
from torch.utils.data import DataLoader

from evener.strategies import FSDPStrategy, SingleDeviceStrategy

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "clipped": {"trainer": {"gradient_clip_val": 0.1}},
    "clipped by value": {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
    "weighted": {"weighted": True},
    "few samples": {"num": 13},
}


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_fsdp_trains_as_one_device_does(num_ranks: int) -> None:
    by_rank = run_ranks(fit_all, num_ranks, FSDPStrategy, CASES, 6, num_ranks, timeout_s=300)
    for (name, batch_size_is), first in by_rank[0].items():
        single = outcome(*fit(SingleDeviceStrategy(), 1, 6, CASES[name]))
        ranks = [outcomes[name, batch_size_is] for outcomes in by_rank]
        for rank in ranks:
            torch.testing.assert_close(rank["weights"], single["weights"], rtol=0, atol=1e-10)
        assert first["metrics"] == pytest.approx(single["metrics"], abs=1e-12), name
        trained = sorted(chain(*(index for rank in ranks for index in rank["trained"])))
        assert trained == sorted(chain(*single["trained"])), name
        for rank in ranks:  # lists of steps of evaluation are gathered to every rank
            assert sorted(rank["validated"]) == sorted(2 * list(range(CASES[name].get("num", NUM_SAMPLES)))), name


class Kind(Net):
    norm = 0.0

    def callbacks(self) -> list[pl.Callback]:
        return []


def _fit(kind: type[Kind], shard: Any, num: int, size: int, epochs: int = 1, fits: int = 1, **options: Any) -> Any:
    """Weights and notes after a training: in shards, or on one device where `shard` is None."""
    torch.manual_seed(0)
    module, ranks = kind(), 1 if shard is None else 2
    given: Any = {"limit_val_batches": 0, "max_epochs": epochs, "callbacks": module.callbacks()}
    for _ in range(fits):
        strategy: Any = SingleDeviceStrategy()
        if shard is not None:
            strategy = FSDPStrategy(shard, batch_size_is="global", timeout_s=60, **options)
        quiet_trainer(strategy, ranks, **given).fit(module, DataLoader(Numbered(num), size))
    return weights(module), module.norm


class Penalised(Kind):
    """With a penalty on the gradient of what it computes by its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        gradient = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        return (self.net(x) - batch[1]).square().mean() + gradient.square().mean()


class Adapts(Kind):
    """A step of MAML: the loss of weights after a step of gradient descent."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, weights = self.net[0], dict(self.net[0].named_parameters())
        loss = functional_call(first, weights, batch[0]).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return (self.net[1:](functional_call(first, adapted, batch[0])) - batch[1]).square().mean()


class Wasserstein(Kind):
    """A generator and a critic whose gradient by its input is penalised, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        of_generator, of_critic = self.optimizers()
        fake = self.net(x).detach()
        mixed = ((fake + y) / 2).requires_grad_()
        slope = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)[0]
        loss = self.critic(fake).mean() - self.critic(y).mean() + (slope.abs() - 1).square().mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(-self.critic(self.net(x)).mean())
        of_generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.net, self.critic)]


@pytest.mark.parametrize(
    ("kind", "parts", "numbers", "options", "told"),
    [
        (Penalised, ["net.0", "net.2"], (6, 3), {}, r"has released, because training_step .* Set strategy\.shard=\[\]"),
        (Adapts, ["net.0"], (8, 4), {"verify": False}, r"set strategy\.shard=\[\]"),
        (Wasserstein, ["critic.0", "critic.2"], (12, 4), {}, r"torch\.autograd\.grad in it, set strategy\.shard=\[\]"),
    ],
)
def test_gradients_within_a_step_are_told_what_to_set_and_it_helps(
    kind: type[Kind], parts: list[str], numbers: Any, options: Any, told: str
) -> None:
    with pytest.raises(RankError, match=told):
        run_ranks(partial(_fit, **options), 2, kind, parts, *numbers)
    for shard in ("auto", []):
        trained = run_ranks(partial(_fit, **options), 2, kind, shard, *numbers)
        if not options:  # unverified ranks adapt to their own samples
            torch.testing.assert_close(trained, [_fit(kind, None, *numbers)] * 2, rtol=0, atol=1e-10)


class Complex(Kind):
    """With complex parameters, of which Adam updates the real and imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        real, imaginary = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3, 1) / 10
        self.net = torch.nn.Sequential(self.net[0], torch.nn.Tanh(), torch.nn.Linear(4, 3).double())
        self.last = torch.nn.Parameter(torch.complex(real, imaginary))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.net(batch[0]).to(torch.complex128) @ self.last).abs() - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Early(Kind):
    """Its optimizer exists before training, as LightningCLI makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.Adam(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class Holds(Kind):
    """Reads a parameter that it has held since before it was cut; a callback reads it between steps, and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = {"decayed": [self.net[0].weight]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(weight.square().sum() for weight in self.groups["decayed"])

    def callbacks(self) -> list[pl.Callback]:
        return [Reads()]


class Reads(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        weight = pl_module.groups["decayed"][0]
        pl_module.norm = weight.norm().item()
        weight.data.mul_(0.9)


class Summed(Kind):
    """A loss that is a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().sum()


class Rooted(Kind):
    """A loss that is no sum of parts'."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().mean().sqrt()


TRAINED: dict[str, Any] = {
    # Adam's view of their real and imaginary parts was read as complex numbers: an error of torch's
    "complex parameters": (Complex, "auto", 9, 4, 2),
    # ranks with samples asked each shard `is_inference`, which gathered it: gloo ended rank 0 by SIGABRT
    "a first batch without samples for a rank": (Kind, "auto", 3, 1, 2),
    "an optimizer made before": (Early, "auto", 6, 3, 2),
    "a parameter kept from before": (Holds, [], 6, 3),
    # shards "could not be compared", so that the second run counted by samples
    "a second fit of a sum": (Summed, "auto", 9, 4, 1, 2),
    "a second fit of a root": (Rooted, "auto", 9, 4, 1, 2),
}


@pytest.mark.parametrize("name", TRAINED)
def test_shards_train_as_one_device_does(name: str) -> None:
    kind, shard, *numbers = TRAINED[name]
    expected = _fit(kind, None, *numbers)
    for found in run_ranks(_fit, 2, kind, shard, *numbers, timeout_s=120):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
