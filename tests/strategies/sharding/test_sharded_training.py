"""What modules and callbacks do with parameters that are sharded: it is what one device does."""

import copy
import io
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed import run_ranks
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from regression import Net, Numbered, quiet_trainer, refusal, weights, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from evener.strategies import ConfigError, FSDPStrategy, SingleDeviceStrategy


class Generative(Net):
    """Two optimizers, each with its own loss; a scale that the module holds itself belongs to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        loss = self.judge(self.net(x)).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = (self.judge(self.net(x).detach()) - y * self.scale.sum()).square().mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))

    def configure_optimizers(self) -> Any:
        judging = [*self.judge.parameters(), self.scale]
        return torch.optim.AdamW(self.net.parameters(), lr=0.05), torch.optim.Adam(judging, lr=0.02)


class ByHand(Net):
    """Reads, clips, scales and clears the gradients of its own parameters within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        optimizer: Any = self.optimizers()
        for _ in range(2):
            self.zero_grad()
            self.manual_backward((self.net(x) - y).square().mean())
            norm = nn.utils.clip_grad_norm_(self.parameters(), 0.3)
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad *= 1 + norm.detach()
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            self.log("norm", norm, on_step=False, on_epoch=True, batch_size=1)
            optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        self.log("norms", torch.stack(norms).sum(), on_step=False, on_epoch=True, batch_size=1)


class Loose(Net):
    """Parameters of the module's own, tied weights, a frozen layer that thaws, and one that is left out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3).double()
        self.second = nn.Linear(3, 3).double()
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def on_train_epoch_start(self) -> None:
        self.frozen.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        x = self.second(self.first(x)) * self.scale + self.frozen(x)
        loss = (self.net(x) - y).square().mean() + 0.1 * self.scale.square().sum()
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss


class Sometimes(Net):
    """A layer that takes part in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        out = self.net(x) + (self.extra(x) if batch_idx % 2 else 0)
        return (out - y).square().mean()


class Scaled(Net):
    """Has parameters without a dimension, as CLIP's `logit_scale`: torch refused them."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6, dtype=torch.float64))
        self.idle = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        scale = self.logit_scale.exp() + (self.sometimes if batch_idx % 2 else 0)
        return (self.net(x) * scale - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Numeric(Net):
    """Reads its weights as numpy arrays, whose memory torch can't release."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read = self.net[0].weight.detach().numpy()
        return super().training_step(batch, batch_idx)


class Penalized(Net):
    """A penalty on a weight outside of its layer's forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        return (self.net(x) - y).square().mean() + 0.1 * self.net[0].weight.square().sum()


class Watched(Net):
    """Reads a weight in its step, of which shards do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norm = self.net[0].weight.detach().norm()
        return super().training_step(batch, batch_idx)


def _told(kind: type[Net]) -> str:
    stream, logger = io.StringIO(), logging.getLogger("pytorch_lightning.utilities.rank_zero")
    logger.addHandler(logging.StreamHandler(stream))
    logger.setLevel(logging.INFO)
    strategy = FSDPStrategy(batch_size_is="global", timeout_s=60)
    quiet_trainer(strategy, 2, max_epochs=1, limit_train_batches=1).fit(kind(), DataLoader(Numbered(), 6))
    return stream.getvalue()


@pytest.mark.parametrize(("kind", "gathered"), [("Watched", False), ("Penalized", True)])
def test_parts_are_gathered_for_the_whole_step_only_where_a_gradient_needs_it(kind: str, gathered: bool) -> None:
    first, _ = run_ranks(_told, 2, globals()[kind])
    assert ("gathered for the whole step: net.0" in first) is gathered


class GradientPenalized(Net):
    """A penalty on the gradient by the inputs, which training differentiates again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        x = x.clone().requires_grad_()
        out = self.net(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out - y).square().mean() + 0.1 * gradient.square().mean()


class Targeted(Net):
    """A target network takes the weights every second step; the loss has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        with torch.no_grad():
            y = y + 0.5 * self.target(x)
        if batch_idx % 2:
            self.target.load_state_dict(self.net.state_dict())
        return (self.net(x) - y).square().mean()


MAKERS: dict[str, Callable[[], tuple[Net, dict[str, Any], dict[str, Any]]]] = {
    "two optimizers": lambda: (Generative(), {}, {}),
    "gradients by hand": lambda: (ByHand(), {}, {}),
    "gradients by hand, gathered for the whole step": lambda: (ByHand(), {"shard": []}, {}),
    "loose, tied, frozen": lambda: (Loose(), {}, {}),
    "gathered for the whole step": lambda: (Loose(), {"shard": []}, {}),
    "not released after forward": lambda: (Net(), {"reshard_after_forward": False}, {}),
    "unused": lambda: (Sometimes(), {"find_unused_parameters": True}, {}),
    "penalty on a weight": lambda: (Penalized(), {}, {}),
    "penalty on a gradient": lambda: (GradientPenalized(), {}, {}),
    "target network": lambda: (Targeted(), {}, {}),
    "target network, gathered for the whole step": lambda: (Targeted(), {"shard": []}, {}),
    "without a dimension": lambda: (Scaled(), {}, {}),
    "without a dimension, accumulated and clipped": lambda: (
        Scaled(),
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "callbacks": [EMAWeightAveraging(decay=0.7)]},
    ),
    "moving average": lambda: (Net(), {}, {"callbacks": [EMAWeightAveraging(decay=0.7)]}),
    "moving average, not released": lambda: (
        Net(),
        {"reshard_after_forward": False},
        {"callbacks": [EMAWeightAveraging(decay=0.7)], "val_check_interval": 1},
    ),
    "stochastic average": lambda: (Net(), {}, {"callbacks": [StochasticWeightAveraging(0.1, 0.5)], "max_epochs": 4}),
    "groups of ranks": lambda: (Net(), {"replicas": 2}, {}),
}


def _trained(name: str, num_ranks: int, **options: Any) -> tuple[Tensor, dict[str, float]]:
    module, given, settings = MAKERS[name]()
    if num_ranks % given.get("replicas", 1):
        given = {}
    strategy = SingleDeviceStrategy() if num_ranks == 1 else FSDPStrategy(batch_size_is="global", **given)
    trainer = quiet_trainer(strategy, num_ranks, **settings, **options)
    trainer.fit(module, DataLoader(Numbered(), 6), DataLoader(Numbered(11), 4))
    return weights(module), {key: float(value) for key, value in trainer.callback_metrics.items()}


def _all_trained(num_ranks: int) -> dict[str, Any]:
    return {name: _trained(name, num_ranks) for name in MAKERS}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_modules_and_callbacks_train_as_on_one_device(num_ranks: int) -> None:
    by_rank = run_ranks(_all_trained, num_ranks, num_ranks, timeout_s=400)
    for name in MAKERS:
        single, metrics = _trained(name, 1)
        for rank in by_rank:
            torch.testing.assert_close(rank[name][0], single, rtol=0, atol=1e-10, msg=lambda text: f"{name}: {text}")  # noqa: B023
        assert by_rank[0][name][1] == pytest.approx(metrics, abs=1e-12), name


class EvaluatedNet(Net):
    test_step = Net.validation_step


def _runs(num_ranks: int, reshard_after_forward: bool, precision: Any) -> tuple[Tensor, list[Any]]:
    """Every kind of run, one after the other in one process, and what each of them returned."""
    ranked = FSDPStrategy(batch_size_is="global", reshard_after_forward=reshard_after_forward, timeout_s=60)
    strategy = SingleDeviceStrategy() if num_ranks == 1 else ranked
    module, loader = EvaluatedNet(), DataLoader(Numbered(11), 4)
    trainer = quiet_trainer(strategy, num_ranks, precision=precision)
    found: list[Any] = []
    for _ in range(2):
        trainer.fit(module, loader, loader)
        trainer.fit_loop.max_epochs = (trainer.max_epochs or 0) + 1
        found += [trainer.validate(module, loader, verbose=False), trainer.test(module, loader, verbose=False)]
        found += [torch.cat(trainer.predict(module, loader))]  # type: ignore[arg-type]
        found += [{name: whole(tensor).clone() for name, tensor in module.state_dict().items()}]
    return weights(module), found


WAYS = [(True, "64-true", 1e-10), (False, "64-true", 1e-10), (False, "32-true", 1e-10), (False, "bf16-true", 5e-2)]


def _all_runs(num_ranks: int) -> list[Any]:
    return [_runs(num_ranks, *way) for *way, _ in WAYS]


def _second_runs(num_ranks: int) -> list[str]:
    told, module = [], Net()
    quiet_trainer(FSDPStrategy(), num_ranks, precision="64-true", max_steps=1).fit(module, DataLoader(Numbered(), 6))
    for options, precision in (
        ({"reshard_after_forward": False}, "64-true"),
        ({"shard": []}, "32-true"),
        ({}, "bf16-true"),
    ):
        trainer = quiet_trainer(FSDPStrategy(timeout_s=60, **options), num_ranks, precision=precision)
        try:
            trainer.validate(module, DataLoader(Numbered(), 6), verbose=False)
        except ConfigError as exc:
            told.append(str(exc))
    averages = quiet_trainer(FSDPStrategy(timeout_s=60), num_ranks, callbacks=[EMAWeightAveraging()])
    return [*told, refusal(averages, module, DataLoader(Numbered(), 6))]


def test_a_second_run_that_would_cut_the_module_in_another_way_is_refused() -> None:
    for kept, parts, dtype, copied in run_ranks(_second_runs, 2, 2):
        assert "with reshard_after_forward=True, now reshard_after_forward=False, and it stays" in kept
        assert "with shard=auto, now shard=[], and it stays" in parts
        assert "with torch.float64, now torch.bfloat16, and it stays" in dtype
        assert copied.startswith("fsdp: Net is cut over the ranks, so that it can't be copied (copy.deepcopy)")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_runs_follow_one_another_in_one_process(num_ranks: int) -> None:
    """Parts stayed gathered after an evaluation step with `reshard_after_forward=false`."""
    for rank, found in enumerate(run_ranks(_all_runs, num_ranks, num_ranks, timeout_s=400)):
        for (*way, tolerance), (trained, shown) in zip(WAYS, found, strict=True):
            single, expected = _runs(1, *way)
            torch.testing.assert_close(trained, single, rtol=0, atol=tolerance)
            if rank == 0:
                torch.testing.assert_close(shown, expected, rtol=0, atol=max(tolerance, 1e-6))


class Summed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        return (self.net(x) - y).square().sum() / 10


def _after_validation(num_ranks: int) -> tuple[Tensor, bool]:
    strategy = SingleDeviceStrategy() if num_ranks == 1 else FSDPStrategy(batch_size_is="global", timeout_s=60)
    module, loader = Summed(), DataLoader(Numbered(11), 4)
    before = list(module.parameters())
    trainer = quiet_trainer(strategy, num_ranks, precision="64-true")
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    return weights(module), num_ranks == 1 or all(
        one is not two for one, two in zip(before, module.parameters(), strict=True)
    )


def test_training_is_verified_after_an_evaluation_that_has_cut_the_module() -> None:
    """A sum counted by samples, in silence."""
    single, _ = _after_validation(1)
    for trained, is_cut in run_ranks(_after_validation, 2, 2):
        torch.testing.assert_close(trained, single, rtol=0, atol=1e-10)
        assert is_cut


class Masked(Net):
    """Divides by a number of samples that differs between ranks, and has a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        mask = (y > 0).double()
        return ((self.net(x) - y).square() * mask).sum() / mask.sum().clamp(min=1)


class Streamed(IterableDataset[Any]):
    """Batches of 4 and 3 samples; each rank reads those of its own, or all."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        samples = [Numbered(14)[i] for i in range(14)]
        self.batches = [default_collate(samples[i:j]) for i, j in ((0, 4), (4, 7), (7, 11), (11, 14))]
        self.batches = self.batches[rank::num_ranks]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class SizedStream(Streamed):
    def __len__(self) -> int:
        return len(self.batches)


def _streamed(num_ranks: int, kind: type[Streamed], size_is: Any) -> Tensor:
    loader: Any = DataLoader(kind(0, 1), None)
    if size_is == "per_device" and num_ranks > 1:
        loader = DataLoader(kind(int(os.environ["RANK"]), num_ranks), None)
    elif size_is == "per_device":  # what two ranks read, put together
        batches = kind(0, 1).batches
        joined: Any = [[torch.cat(both) for both in zip(*batches[i : i + 2], strict=True)] for i in (0, 2)]
        loader = DataLoader(joined, None)
    module = Masked()
    strategy = SingleDeviceStrategy() if num_ranks == 1 else FSDPStrategy(batch_size_is=size_is, timeout_s=60)
    quiet_trainer(strategy, num_ranks, precision="64-true").fit(module, loader)
    return weights(module)


STREAMS = [(kind, size_is) for kind in (Streamed, SizedStream) for size_is in ("global", "per_device")]


def _all_streamed(num_ranks: int) -> list[Tensor]:
    return [_streamed(num_ranks, *case) for case in STREAMS]


def test_a_streams_first_batch_is_looked_at_before_the_module_is_cut() -> None:
    """The loss counted by samples, and layers that took no part were refused."""
    single = _all_streamed(1)
    for found in run_ranks(_all_streamed, 2, 2):
        torch.testing.assert_close(found, single, rtol=0, atol=1e-10)


class Mixed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.shift = nn.Parameter(torch.ones(2, dtype=torch.float32))


class OptimizedBy(Net):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Sparse(Net):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 1, sparse=True).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.table(batch[2] % 4).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _refusals(num_ranks: int) -> list[str]:
    told = []
    whole_step = {"shard": []}
    pruned = {"callbacks": [ModelPruning("l1_unstructured", amount=0.3)]}
    unused, outside = (Sometimes(), {"find_unused_parameters": False}), (Penalized(), {"shard": ["net.0"]})
    lbfgs, adafactor = OptimizedBy(torch.optim.LBFGS), OptimizedBy(torch.optim.Adafactor)
    modules = [unused, outside, Mixed(), lbfgs, adafactor, Sparse(), (Numeric(), whole_step), (Net(), pruned)]
    for given in modules:
        module, options = given if isinstance(given, tuple) else (given, dict[str, Any]())
        own: dict[str, Any] = {
            name: options.pop(name) for name in ("shard", "find_unused_parameters") if name in options
        }
        trainer = quiet_trainer(FSDPStrategy(**own, batch_size_is="global", timeout_s=60), num_ranks, **options)
        try:
            trainer.fit(module, DataLoader(Numbered(), 6))
        except (ConfigError, RuntimeError) as exc:
            told.append(f"{trainer.global_step}: {exc}")
    return told


def test_what_cannot_be_trained_exactly_is_refused_before_the_first_step() -> None:
    for unused, outside, dtypes, lbfgs, adafactor, sparse, arrays, pruned in run_ranks(_refusals, 2, 2):
        assert unused.startswith("0: fsdp: parameters took no part in the loss: extra.weight, extra.bias. Set ")
        assert outside.startswith("0: fsdp: a step uses a parameter of a part outside of the part's forward")
        assert dtypes.startswith("0: fsdp: the parameters of Mixed have several dtypes")
        assert lbfgs.startswith("0: fsdp: LBFGS computes with whole parameters, but each rank has a shard of each.")
        assert adafactor.startswith("0: fsdp: Adafactor computes with whole parameters")
        assert sparse.startswith("0: fsdp: the gradient of table.weight is sparse, and can't be cut over the ranks")
        assert arrays.startswith("0: fsdp: a step made a numpy array of a gathered parameter, whose memory can't be")
        assert pruned.startswith("0: fsdp: ModelPruning puts other parameters in the place of those that are cut")


def _uneven(num_ranks: int) -> Tensor:
    module = Net()
    strategy = FSDPStrategy(batch_size_is="global", weights=[3, 1])
    quiet_trainer(strategy, num_ranks).fit(module, DataLoader(Numbered(), 6))
    assert [len(step) for step in module.trained][:3] == ([5, 5, 5] if strategy.global_rank == 0 else [1, 1, 1])
    return weights(module)


def test_ranks_of_unequal_shares_train_as_one_device() -> None:
    single = Net()
    quiet_trainer(SingleDeviceStrategy()).fit(single, DataLoader(Numbered(), 6))
    for rank in run_ranks(_uneven, 2, 2):
        torch.testing.assert_close(rank, weights(single), rtol=0, atol=1e-10)


class Recurrent(Net):
    """A layer whose weights cuDNN moves to one piece of memory, in the first forward after they are others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), _Last(4, 4, batch_first=True), nn.Linear(4, 1)).double()


class _Last(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x[:, None])[0][:, -1]

    def flatten_parameters(self) -> None:
        with torch.no_grad():
            for weight in self._flat_weights:
                torch.Tensor.set_(weight, weight.detach().clone())  # type: ignore[arg-type]


def _fit_recurrent(shard: list[str] | None) -> Tensor:
    module = Recurrent()
    strategy = (
        SingleDeviceStrategy() if shard is None else FSDPStrategy(batch_size_is="global", shard=shard, timeout_s=60)
    )
    quiet_trainer(strategy, 1 if shard is None else 2).fit(module, DataLoader(Numbered(16), 4))
    return weights(module)


@pytest.mark.parametrize("shard", [["net.1"], []])
def test_weights_of_a_recurrent_layer_are_those_of_the_last_step(shard: list[str]) -> None:
    # Failed before, on a GPU: torch's FSDP gathered weights into memory that cuDNN no longer looked at.
    for found in run_ranks(_fit_recurrent, 2, shard):
        torch.testing.assert_close(found, _fit_recurrent(None), rtol=0, atol=1e-10)
