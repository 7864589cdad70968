"""FSDP trains as one device does, with a part of everything on each rank."""

from itertools import chain
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks
from regression import NUM_SAMPLES, Net, Numbered, fit, fit_all, outcome, quiet_trainer, weights
from torch.func import functional_call
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, FSDPStrategy, SingleDeviceStrategy

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


class Penalised(Net):
    """With a penalty on the gradient of what it computes by its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        gradient = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        return (self.net(x) - batch[1]).square().mean() + gradient.square().mean()


def _fit_penalised(shard: Any) -> None:
    strategy = FSDPStrategy(shard, batch_size_is="global", timeout_s=60)
    quiet_trainer(strategy, 2, max_epochs=1).fit(Penalised(), DataLoader(Numbered(6), 3))


def test_a_gradient_penalty_is_told_to_leave_the_module_uncut() -> None:
    with pytest.raises(RankError, match=r"has released, because training_step .* Set strategy\.shard=\[\]"):
        run_ranks(_fit_penalised, 2, "auto")
    run_ranks(_fit_penalised, 2, [])


class Adapts(Net):
    """A step of MAML: the loss of weights after a step of gradient descent."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, weights = self.net[0], dict(self.net[0].named_parameters())
        loss = functional_call(first, weights, batch[0]).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return (self.net[1:](functional_call(first, adapted, batch[0])) - batch[1]).square().mean()


def _adapted(shard: Any) -> None:
    strategy = FSDPStrategy(shard, batch_size_is="global", timeout_s=60, verify=False)
    quiet_trainer(strategy, 2, max_epochs=1).fit(Adapts(), DataLoader(Numbered(8), 4))


def test_gradients_by_parameters_of_a_part_are_told_to_gather_all() -> None:
    with pytest.raises(RankError, match=r"set strategy\.shard=\[\]"):
        run_ranks(_adapted, 2, "auto")
    run_ranks(_adapted, 2, [])


class Wasserstein(Net):
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


def _penalised_by_hand(strategy: Any, num_ranks: int) -> torch.Tensor | str:
    module = Wasserstein()
    try:
        quiet_trainer(strategy, num_ranks, max_epochs=1).fit(module, DataLoader(Numbered(12), 4))
    except ConfigError as exc:
        return str(exc)
    return weights(module)


def _penalised_on_ranks() -> list[Any]:
    return [_penalised_by_hand(FSDPStrategy(shard, batch_size_is="global", timeout_s=60), 2) for shard in ("auto", [])]


def test_what_a_penalty_by_hand_is_told_to_set_helps() -> None:
    for told, trained in run_ranks(_penalised_on_ranks, 2):
        assert "torch.autograd.grad in it, set strategy.shard=[]" in told
        torch.testing.assert_close(trained, _penalised_by_hand(SingleDeviceStrategy(), 1), rtol=0, atol=1e-10)


class Complex(Net):
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


def _fit_complex(strategy: Any = None) -> Any:
    torch.manual_seed(0)
    module = Complex()
    strategy, num_ranks = (strategy, 1) if strategy else (FSDPStrategy(batch_size_is="global", timeout_s=60), 2)
    quiet_trainer(strategy, num_ranks, limit_val_batches=0).fit(module, DataLoader(Numbered(9), 4))
    return weights(module)


def test_complex_parameters_are_trained_in_shards() -> None:
    # Their real and imaginary parts, as which Adam views them, were read as complex numbers: an error of torch's.
    single = _fit_complex(SingleDeviceStrategy())
    for rank in run_ranks(_fit_complex, 2, timeout_s=120):
        torch.testing.assert_close(rank, single, rtol=0, atol=1e-10)


def _fit_singly() -> Any:
    module = Net()
    quiet_trainer(FSDPStrategy(batch_size_is="global", timeout_s=60), 2).fit(module, DataLoader(Numbered(3), 1))
    return weights(module)


def test_a_rank_without_samples_in_the_first_batch_waits_for_nothing() -> None:
    # Ranks with samples asked each shard `is_inference`, which gathered it: gloo ended rank 0 by SIGABRT.
    module = Net()
    quiet_trainer(SingleDeviceStrategy(), 1).fit(module, DataLoader(Numbered(3), 1))
    for rank in run_ranks(_fit_singly, 2, timeout_s=120):
        torch.testing.assert_close(rank, weights(module), rtol=0, atol=1e-10)


class Early(Net):
    """Its optimizer exists before training, as LightningCLI makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.Adam(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class Holds(Net):
    """Reads a parameter that it has held since before it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = {"decayed": [self.net[0].weight]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(weight.square().sum() for weight in self.groups["decayed"])


class Reads(pl.Callback):
    """Reads such a parameter between steps, and writes to it."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        weight = pl_module.groups["decayed"][0]
        self.norm = weight.norm().item()
        weight.data.mul_(0.9)


def _fit_early() -> Any:
    torch.manual_seed(0)
    module = Early()
    quiet_trainer(FSDPStrategy(batch_size_is="global", timeout_s=60), 2, max_epochs=2).fit(
        module, DataLoader(Numbered(6), 3)
    )
    return weights(module)


def test_an_optimizer_made_before_trains_the_shards() -> None:
    torch.manual_seed(0)
    module = Early()
    quiet_trainer(SingleDeviceStrategy(), 1, max_epochs=2).fit(module, DataLoader(Numbered(6), 3))
    for rank in run_ranks(_fit_early, 2, timeout_s=120):
        torch.testing.assert_close(rank, weights(module), rtol=0, atol=1e-10)


def _fit_holding(strategy: Any, num: int) -> Any:
    torch.manual_seed(0)
    module, reads = Holds(), Reads()
    quiet_trainer(strategy, num, max_epochs=1, callbacks=[reads]).fit(module, DataLoader(Numbered(6), 3))
    return weights(module), reads.norm


def _fit_holding_shards() -> Any:
    return _fit_holding(FSDPStrategy(shard=[], batch_size_is="global", timeout_s=60), 2)


def test_a_parameter_that_was_kept_from_before_is_the_one_that_is_trained() -> None:
    single = _fit_holding(SingleDeviceStrategy(), 1)
    for rank in run_ranks(_fit_holding_shards, 2):
        torch.testing.assert_close(rank, single, rtol=0, atol=1e-10)


class Summed(Net):
    """A loss that is a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().sum()


class Rooted(Net):
    """A loss that is no sum of parts'."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().mean().sqrt()


def _fit_twice(strategy: Any, module: type[Net]) -> torch.Tensor:
    torch.manual_seed(1)
    trained = module()
    for _ in range(2):
        made = strategy(batch_size_is="global", timeout_s=60) if strategy is FSDPStrategy else strategy()
        quiet_trainer(made, 2 if strategy is FSDPStrategy else 1, max_epochs=1).fit(trained, DataLoader(Numbered(9), 4))
    return weights(trained)


@pytest.mark.parametrize("module", [Summed, Rooted])
def test_a_second_fit_knows_what_the_first_has_found_of_the_whole_module(module: type[Net]) -> None:
    # shards "could not be compared", so that the second run counted by samples
    expected = run_ranks(_fit_twice, 1, SingleDeviceStrategy, module)[0]
    for found in run_ranks(_fit_twice, 2, FSDPStrategy, module):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
