"""Before the first step a few samples show whether a module trains in parts of a batch as on the whole one."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from parity import Case, make_trainer
from regression import Points, weights
from tiny import Streamed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from evener.strategies import (
    ConfigError,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

NUM = 21


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(NUM, 3, generator=g).double(), torch.arange(NUM) % 2)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.calls: list[int] = []

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(len(batch[0]))
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(module: Net, strategy: Any, loader: Any = None, devices: int = 2) -> Tensor:
    """The weights after three steps of at most 8 samples."""
    trainer = make_trainer(Case(), strategy, devices=devices, max_steps=3)
    trainer.fit(module, DataLoader(data(), 8) if loader is None else loader)
    return weights(module)


class Pairs(Net):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x) @ self.net(x).T, torch.arange(len(x)))


class Spread(Net):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).var(0, correction=0).mean()


class Writes(Net):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += x.mean()
        return super().loss(x, y)


COMPARED = "dp: computed in chunks of 4, 3 and 1 samples, the gradient of net."


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Pairs, COMPARED),
        (Spread, COMPARED),
        (Writes, "dp: training_step changes seen by the samples of its part of a batch"),
    ],
)
def test_what_parts_train_otherwise_is_refused_in_forty_words(module: type[Net], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trained(module(), DataParallelStrategy(global_view=False))
    found = str(refused.value)
    assert found.startswith(told)
    if told == COMPARED:
        assert all(
            word in found
            for word in ("over_batch(fn)", "pad to a fixed", "strategy.global_view=false", "strategy.verify=false")
        )
        assert len(found.split()) <= 40


class Noisy(Net):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x + torch.randn_like(x)), y)


@pytest.mark.parametrize(
    ("module", "options"), [(Pairs, {"verify": False}), (Pairs, {"verify_loss": False}), (Noisy, {})]
)  # the second is an earlier name; random numbers of a step are no reason to refuse it
def test_what_is_not_refused_trains(module: type[Net], options: Any) -> None:
    assert torch.isfinite(trained(module(), DataParallelStrategy(**options))).all()


class Estimates(Net):
    """Improves the estimate of its norm in each forward, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.net[0])

    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.seen += 1
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return super().loss(x, y)


def test_what_each_micro_batch_would_do_to_the_module_is_done_on_whole_batches(caplog: Any) -> None:
    one, two = Estimates(), Estimates()
    with caplog.at_level("INFO"):
        found = trained(two, ModelParallelStrategy(num_microbatches=2))
    torch.testing.assert_close(found, trained(one, SingleDeviceStrategy(), devices=1), rtol=0, atol=1e-12)
    assert float(two.seen) == two.num_calls == 3
    torch.testing.assert_close(dict(two.named_buffers()), dict(one.named_buffers()), rtol=0, atol=1e-12)
    assert (
        "training_step changes net.0.parametrizations.weight.0._u in each micro-batch, unlike one device. So"
        in caplog.text
    )


class Calls(Net):
    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        self.last_size = len(x)
        loss = super().loss(x, y)
        self.last_loss = loss.item()
        return loss


@pytest.mark.parametrize(
    ("strategy", "names", "left"),
    [
        (ModelParallelStrategy(num_microbatches=2), "last_loss, last_size, num_calls", (6, 2)),
        (DataParallelStrategy(), "last_loss, last_size", (3, 3)),  # the root's chunk of the last batch of 5
    ],
)
def test_an_attribute_that_nobody_reads_is_told_once(
    strategy: Any, names: str, left: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = Calls()
    with caplog.at_level("INFO"):
        trained(module, strategy)
    told = f"training_step leaves {names} otherwise in parts of a batch than in the whole one"
    assert caplog.text.count(told) == 1
    assert (module.num_calls, module.last_size) == left
    assert sum(module.calls) == 8 + 8 + 5  # what the look has appended is gone


class Weighed(Net):
    """Divides by the sum of the weights of its classes."""

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.net(x), y, weight=torch.tensor([1.0, 5.0], dtype=x.dtype))


class Changed(Weighed):
    """Computes something else from the second step on."""

    def loss(self, x: Tensor, y: Tensor) -> Any:
        loss = super().loss(x, y)
        return loss.exp() if self.global_step else loss


def test_a_loss_that_is_computed_otherwise_later_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the loss is computed otherwise than in the first step.*evener\.mean"):
        trained(Changed(), DataParallelStrategy(global_view=False))


class SaysSamples(Weighed):
    def loss(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": super().loss(x, y), "loss_weight": len(x)}


class Listed(Net):
    """Is given two settings with each batch, which a stream of two samples does not tell from a list of samples."""

    def loss(self, x: Tensor, y: Tensor, settings: Any = (2, 3)) -> Any:
        weights = 1.0 + y
        loss = F.cross_entropy(self.net(x), y, reduction="none") * sum(settings)
        return {"loss": (loss * weights).sum() / weights.sum(), "loss_weight": int(weights.sum())}


class Trimmed(Net):
    """Chooses samples by a statistic of the batch, which parts of one cut may choose as well by chance."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return losses[losses <= losses.quantile(0.8)].mean()


class ActsInTraining(Net):
    """Has a layer that centres by the batch, in training alone."""

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, self.Centred())


class Ranked(Net):
    """Ranks the samples of a query, of which there are four side by side."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        score = self.net(x)[:, 0]
        pairs = (y[:, None] == y) & (x[:, None, 0] > x[:, 0])
        return F.softplus(score - score[:, None])[pairs].sum() / pairs.sum().clamp(min=1)


class Annealed(Weighed):
    """Changes the weight of a term with each step; at first it is 0."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.global_step / 3 * self.net(x).pow(2).mean()


class Curriculum(Net):
    """Leaves out the samples with the largest losses, from the second epoch on."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (losses.topk(max(1, len(x) // 2), largest=False).values if self.current_epoch else losses).mean()


class CountsRare(Net):
    """Divides by a number of Python's, at least 1; most parts have none of what is counted."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        rare = x[:, 0] > 1
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (losses * rare).sum() / max(1, rare.sum().item())


class Masked(Net):
    """Is given masks, of which one part of the third batch has zeros only."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x).pow(2).sum(1) * y).sum() / y.sum()


def masks() -> DataLoader[Any]:
    mask = torch.rand(NUM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask[16:19] = 0
    return DataLoader(TensorDataset(data().tensors[0], mask), 8)


def queries() -> DataLoader[Any]:
    return DataLoader(TensorDataset(data().tensors[0], torch.arange(NUM) // 4), 8)


def beside_settings(samples: Any) -> Any:
    return (*default_collate(samples), [2, 3])


ALIKE: dict[str, tuple[type[Net], Callable[[], Any]]] = {
    **{
        f"samples chosen by a statistic, from {i}": (
            Trimmed,
            lambda i=i: DataLoader(Subset(data(), range(i, i + 12)), 6),
        )
        for i in range(6)
    },
    "a layer that acts in training alone": (ActsInTraining, lambda: DataLoader(data(), 8)),
    "neighbours that belong together": (Ranked, queries),
    "a part without anything that counts": (Masked, masks),
    "a weight that changes from step to step": (Annealed, lambda: DataLoader(data(), 8)),
    "a number that is at least one": (CountsRare, lambda: DataLoader(data(), 8)),
    "another loss from the second epoch on": (Curriculum, lambda: DataLoader(data(), 14)),
    "another loss from the second step on": (Changed, lambda: DataLoader(data(), 8)),
    "a stream, of which the first batch is looked at": (Weighed, lambda: DataLoader(Streamed(data()), 8)),
    # a warning told that the parts were wrong, which no loss_weight makes right
    "a loss_weight that is not what the loss divides by": (SaysSamples, lambda: DataLoader(data(), 8)),
    "settings beside a stream's samples": (Listed, lambda: DataLoader(Streamed(data()), 2, collate_fn=beside_settings)),
}


@pytest.mark.parametrize("strategy", [DataParallelStrategy, lambda: ModelParallelStrategy(num_microbatches=2)])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_exact_in_parts_or_on_whole_batches_trains_as_on_one_device(name: str, strategy: Any) -> None:
    module, loader = ALIKE[name]
    found = trained(module(), strategy(), loader())
    torch.testing.assert_close(found, trained(module(), SingleDeviceStrategy(), loader(), 1), rtol=0, atol=1e-12)


class ReadyBatches(torch.utils.data.Dataset[Any]):
    """Makes the batch of some indices itself, as datasets in memory do."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batches are made by __getitems__")

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [tensor[indices] for tensor in data().tensors]


def test_batches_of_a_dataset_that_makes_them_itself_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    # Failed before: two tensors were taken for samples, so that some parts were empty and steps got whole batches.
    loader = DataLoader(ReadyBatches(), batch_size=8, collate_fn=list)
    with caplog.at_level("INFO"):
        found = trained(Net(), DataParallelStrategy(), loader)
    assert "whole batches" not in caplog.text
    torch.testing.assert_close(found, trained(Net(), SingleDeviceStrategy(), loader, 1), rtol=0, atol=1e-10)


class CountsPairs(Pairs):
    """Needs whole batches, and what a hook makes that runs after the first comparison."""

    def on_train_epoch_start(self) -> None:
        self.num_steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_steps += 1
        return super().loss(x, y)


def _refused() -> tuple[str, int]:
    strategy = FSDPStrategy(batch_size_is="global", timeout_s=60)
    trainer = make_trainer(Case(), strategy, devices=2, max_epochs=2)
    with pytest.raises(ConfigError) as refused:
        trainer.fit(CountsPairs(), DataLoader(data(), 14))
    return str(refused.value), trainer.global_step


def test_what_ranks_train_otherwise_is_refused_where_it_is_too_late_for_whole_batches() -> None:
    # it trained in parts, as a trial had failed before the hooks
    for told, num in run_ranks(_refused, 2):
        assert "computed in ranks of 4, 3 and 1 samples" in told
        assert "set strategy.global_view=true, which is exact but slower" in told
        assert num == 0


class Carries(Net):
    """Carries its rows' states to the next batch, and counts samples in training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = 0.0

    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.state = self.state + x.detach()
        return super().loss(self.state, y)


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.num += len(x)
        return super().loss(x, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num += len(batch[0])


class InPlace(Net):
    """Counts classes in an array, a tensor within a dictionary, and a Counter; returns rows of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.counter, self.inside = np.zeros(2), Counter[int](), {"all": torch.zeros(2)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.net(batch[0])
        for row in rows.numpy().argmax(1):
            self.array[row] += 1
            self.inside["all"][row] += 1
            self.counter[row] += 1
        self.log("median", rows.median())
        return rows


class Draws(Net):
    """Draws a factor for each batch from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = random.Random(1)

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return super().loss(x * self.generator.uniform(0.5, 2), y)


class DrawsInNumpy(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)


class RowPairs(Net):
    """Compares each even row with the next one."""

    def loss(self, x: Tensor, y: Tensor) -> Any:
        first, second = self.net(x)[: len(x) // 2 * 2].view(-1, 2, 2).unbind(1)
        return F.softplus(first - second).mean()


class Episodes(Net):
    """Takes batches of seven rows alone."""

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return self.net(x).view(7, -1).var(0).sum()


def two_epochs(kind: type[Net], strategy: Any, devices: int = 2, batch_size: int = 7) -> tuple[Tensor, dict[str, Any]]:
    """The weights after two epochs of three batches, and what else the module and its trainer have."""
    module, loader = kind(), DataLoader(data(), batch_size)
    trainer = make_trainer(Case(), strategy, devices=devices, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, loader, *([loader] if kind in (Counts, InPlace) else []))
    kept = {name: getattr(module, name, None) for name in ("num", "array", "counter", "inside")}
    return weights(module), {**kept, **trainer.callback_metrics}


@pytest.mark.parametrize("strategy", [DataParallelStrategy, lambda: ModelParallelStrategy(num_microbatches=2)])
@pytest.mark.parametrize("kind", [Carries, Counts, InPlace, Draws, DrawsInNumpy, RowPairs, Episodes])
def test_what_steps_keep_and_draw_is_one_device_s(kind: type[Net], strategy: Any) -> None:
    (found, kept), (expected, known) = two_epochs(kind, strategy()), two_epochs(kind, SingleDeviceStrategy(), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(kept.pop("array"), known.pop("array"), rtol=0, atol=0)
    torch.testing.assert_close(kept, known, rtol=0, atol=1e-12)
    if kind is Counts:
        assert kept["num"] == 4 * 21
    if kind is InPlace:
        assert kept["counter"].total() == 2 * 21


@pytest.mark.parametrize(
    ("kind", "batch_size", "strategy"),
    [
        *(
            (kind, size, DDPStrategy)
            for kind, size in ((RowPairs, 6), (Draws, 7), (Episodes, 7), (Curriculum, 14), (CountsPairs, 14))
        ),
        *((kind, size, FSDPStrategy) for kind, size in ((Episodes, 7), (Curriculum, 14))),
    ],
)
def test_ranks_whose_parts_are_not_those_of_a_few_samples_train_as_one_device(
    kind: type[Net], batch_size: int, strategy: Any
) -> None:
    expected, _ = two_epochs(kind, SingleDeviceStrategy(), 1, batch_size)
    for found, _ in run_ranks(two_epochs, 2, kind, strategy(batch_size_is="global"), 2, batch_size):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Logs(Net):
    """Writes to its logger itself, in each step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logger: Any = self.logger
        logger.log_metrics({"mean": float(x.mean())}, step=self.global_step)
        logger.experiment.add_scalar("mean", 0.0)
        return super().loss(x, y)


def test_the_look_at_a_few_samples_writes_nothing_to_loggers() -> None:
    # failed before: 20 rows more at step 0
    logger = Points()
    trainer = make_trainer(Case(), DataParallelStrategy(), devices=2, max_steps=3, logger=logger, log_every_n_steps=100)
    trainer.fit(Logs(), DataLoader(data(), 8))
    assert [step for step, _ in logger.of("mean")] == [0, 0, 1, 1, 2, 2]
