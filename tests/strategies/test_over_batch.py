"""Losses that compare samples are one device's under every strategy: by `evener.over_batch`, whose losses are those of
the docs, by rows that ranks gather, and by gradients of cached embeddings."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # as the docs write it
from distributed import run_ranks
from regression import quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.strategies import (
    BalancedDataParallelStrategy,
    BalancedDDPStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

PAGE = Path(__file__).parents[2] / "docs" / "over_batch.md"
FEATURES, CLASSES = 4, 3
EXACT = 1e-10


class Base(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(*batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def _documented() -> dict[str, Any]:
    """The functions and modules of the page."""
    names: dict[str, Any] = {"Base": Base, "evener": evener, "torch": torch, "nn": nn, "F": F, "Tensor": Tensor}
    names |= {"Any": Any, "CLASSES": CLASSES}
    known = set(names)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in blocks:
        if "class " in block:
            exec(compile(block, str(PAGE), "exec"), names)
    return {name: value for name, value in names.items() if name not in known}


DOCUMENTED = _documented()
MODULES: dict[str, Any] = {name: value for name, value in DOCUMENTED.items() if isinstance(value, type)}


class Twice(Base):
    """Two losses over the batch beside a mean, one of them on other numbers of rows."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        first = evener.over_batch(lambda z: z.std(0).sum())(z)
        second = evener.over_batch(lambda z, y: z.amax() * y.double().mean())(z.repeat_interleave(2, 0), y)
        return first + 0.5 * second + 0.1 * z.square().mean()


class WeighedByTokens(Base):
    """A `loss_weight` of its own, which other terms of the loss need."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self.net(x)
        counts = (x > 0).sum(1).double()
        mean = (F.cross_entropy(z, y, reduction="none") * counts).sum() / counts.sum().clamp(min=1)
        loss = mean + evener.over_batch(DOCUMENTED["info_nce"])(z, z.tanh())
        return {"loss": loss, "loss_weight": counts.sum()}


MODULES |= {"Twice": Twice, "WeighedByTokens": WeighedByTokens}


class OwnRows(Base):
    """SimCLR's loss: own rows against those of all ranks."""

    def rows(self, z: Tensor) -> Tensor:
        return self.all_gather(z, sync_grads=True).flatten(0, 1) if self.trainer.world_size > 1 else z

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = (F.normalize(self.net(view), dim=1) for view in (x, x.flip(1)))
        similar = torch.exp(torch.cat([first, second]) @ torch.cat([self.rows(first), self.rows(second)]).T)
        positive = torch.exp((first * second).sum(1)).repeat(2)
        return -torch.log(positive / (similar.sum(1) - math.e)).mean()


class AllRows(OwnRows):
    """CLIP's loss: each rank computes that of all rows."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.rows(self.net(x)) @ self.rows(self.net(x.flip(1))).T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Cached(Base):
    """Caches embeddings, whose gradients go backward through the network in chunks: each chunk's counts once."""

    automatic_optimization = False

    def of_embeddings(self, z: Tensor) -> Tensor:
        return z.square().mean()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of_embeddings(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chunks = batch[0].split(2)
        with torch.no_grad():
            embeddings = torch.cat([self.net(chunk) for chunk in chunks])
        loss = self.of_embeddings(embeddings.requires_grad_())
        gradients = torch.autograd.grad(loss, embeddings)[0].split(2)
        if self.automatic_optimization:
            loss = loss.detach().requires_grad_()
            loss.register_hook(functools.partial(self.through, chunks, gradients))
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for chunk, gradient in zip(chunks, gradients, strict=True):
            self.manual_backward((self.net(chunk) * gradient).sum())
        optimizer.step()
        return None

    def through(self, chunks: Any, gradients: Any, scale: Tensor) -> None:
        with torch.enable_grad():
            for chunk, gradient in zip(chunks, gradients, strict=True):
                (self.net(chunk) * gradient * scale).sum().backward()


class CachedOverBatch(Cached):
    def of_embeddings(self, z: Tensor) -> Tensor:
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class CachedInHook(Cached):
    """Chunks go backward in a hook of the loss."""

    automatic_optimization = True


class CachedOverBatchInHook(CachedOverBatch):
    automatic_optimization = True


def _loader(num: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(num, FEATURES, generator=generator, dtype=torch.float64), torch.arange(num) % CLASSES
    y[18:] = 0  # the last two samples are a pair
    return DataLoader(TensorDataset(x, y), batch_size=9)


Fitted = tuple[Tensor, dict[str, float]]


def _fit(kind: type[Base], strategy: Any, devices: int = 1, **options: Any) -> Fitted:
    """Weights and logged values after batches of 9, 9 and 2 samples."""
    torch.manual_seed(3)
    module = kind().double()
    trainer = quiet_trainer(strategy, devices, max_epochs=1, num_sanity_val_steps=0, **options)
    trainer.fit(module, _loader(20), _loader(18))
    return weights(module), {key: float(value) for key, value in trainer.callback_metrics.items()}


def _verify(found: Fitted, expected: Fitted) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=EXACT)
    assert found[1] == pytest.approx(expected[1], abs=EXACT)


@functools.cache
def _on_one_device(kind: type[Base], **options: Any) -> Fitted:
    return _fit(kind, SingleDeviceStrategy(), **options)


ACCUMULATED = {"accumulate_grad_batches": 2}
IN_ONE_PROCESS: dict[str, tuple[Callable[[], Any], int]] = {
    "dp": (lambda: DataParallelStrategy(), 9),  # of which each waits for the others
    "micro_batches": (lambda: ModelParallelStrategy(num_microbatches=3), 2),
    "balanced_dp": (lambda: BalancedDataParallelStrategy(weights=[8, 1]), 2),
}


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *((strategy, kind) for strategy in IN_ONE_PROCESS for kind in MODULES.values()),
        *(("dp", kind) for kind in (CachedOverBatch, CachedInHook)),
    ],
)
def test_a_loss_over_the_batch_trains_as_on_one_device(strategy: str, kind: Any) -> None:
    make, devices = IN_ONE_PROCESS[strategy]
    _verify(_fit(kind, make(), devices), _on_one_device(kind))
    if kind is MODULES["CLIP"]:  # each forward pass has its own batch under accumulation
        _verify(_fit(kind, make(), devices, **ACCUMULATED), _on_one_device(kind, **ACCUMULATED))


RANKS: dict[str, tuple[Callable[[], Any], int]] = {
    "ddp": (lambda: DDPStrategy(batch_size_is="global"), 3),  # the last batch leaves a rank without
    "balanced_ddp": (lambda: BalancedDDPStrategy(weights=[5, 1], batch_size_is="global"), 2),
    "ddp_of_replicas": (lambda: DDPStrategy(devices_per_process=2, batch_size_is="global"), 2),
    "ddp_of_micro_batches": (
        lambda: DDPModelParallelStrategy(model_parallel_size=2, num_microbatches=2, batch_size_is="global"),
        2,
    ),
    "fsdp": (lambda: FSDPStrategy(batch_size_is="global"), 3),
}


GATHERED = {"OwnRows": OwnRows, "AllRows": AllRows, "Cached": Cached, "CachedOverBatch": CachedOverBatch}
IN_HOOKS = {"CachedInHook": CachedInHook, "CachedOverBatchInHook": CachedOverBatchInHook}


def _kinds(strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    if options:
        return {"CLIP": MODULES["CLIP"]}
    return MODULES | ({} if "_of_" in strategy else GATHERED) | (IN_HOOKS if strategy == "ddp" else {})


def _fit_all(strategy: str, devices: int, options: dict[str, Any]) -> dict[str, Fitted]:
    kinds = _kinds(strategy, options)
    return {name: _fit(kind, RANKS[strategy][0](), devices, **options) for name, kind in kinds.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options"), [*((one, {}) for one in RANKS), ("ddp", ACCUMULATED), ("fsdp", ACCUMULATED)]
)
def test_losses_over_the_batch_train_under_ranks_as_on_one_device(strategy: str, options: dict[str, Any]) -> None:
    num = RANKS[strategy][1]
    for of_a_rank in run_ranks(_fit_all, num, strategy, num * (2 if "_of_" in strategy else 1), options):
        for name, fitted in of_a_rank.items():
            expected = _on_one_device(_kinds(strategy, options)[name], **options)
            torch.testing.assert_close(fitted[0], expected[0], rtol=0, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}")
            assert fitted[1].get("val") == pytest.approx(expected[1].get("val"), abs=EXACT), name


def _refused() -> str:
    with pytest.raises(ConfigError) as error:
        _fit(CachedInHook, FSDPStrategy(), 2)
    return str(error.value)


def test_shards_refuse_gradients_that_a_hook_computes() -> None:
    for said in run_ranks(_refused, 2):
        assert "the loss has no graph, so that hooks compute the gradients" in said


class Ended(Base):
    def training_step_end(self, outputs: Any) -> Any:
        return outputs


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy(), DataParallelStrategy(), DDPStrategy()])
def test_lightning_1s_hook_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"Ended defines training_step_end, .* in evener.over_batch\(fn\)"):
        _fit(Ended, strategy)


class Late(Base):
    """Calls it from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.net(batch[0])
        return evener.over_batch(lambda z: z.std(0).sum())(z) if self.global_step else z.mean()


def test_micro_batches_whose_first_step_did_not_need_all_rows_are_refused_later() -> None:
    with pytest.raises(ConfigError, match=r"needs the rows of all micro-batches at once, but was not called"):
        _fit(Late, ModelParallelStrategy(num_microbatches=3), 2)


def test_micro_batches_that_must_meet_are_refused_where_whole_batches_are() -> None:
    strategy = ModelParallelStrategy(num_microbatches=3, global_view=False)
    with pytest.raises(ConfigError, match=r"needs the rows of all micro-batches at once, which run one"):
        _fit(MODULES["CLIP"], strategy, 2)


def test_outside_of_strategies_the_function_is_called_as_it_is() -> None:
    given = torch.ones(3, 2, requires_grad=True)

    def loss(rows: Tensor, word: str, scale: int = 1) -> Tensor:
        assert (rows is given, word, scale) == (True, "w", 1)
        return rows.sum()

    evener.over_batch(loss)(given, "w").backward()
    assert given.grad is not None
    assert given.grad.tolist() == [[1.0, 1.0]] * 3


def _evaluate(strategy: Any, devices: int) -> float:
    torch.manual_seed(1)
    trainer = quiet_trainer(strategy, devices)
    (found,) = trainer.validate(MODULES["CLIP"]().double(), _loader(11), verbose=False)  # batches of 9 and 2 samples
    return sum(found.values())


@pytest.mark.long
def test_an_evaluation_batch_without_samples_for_every_rank_is_evaluated_whole() -> None:
    expected = _evaluate(SingleDeviceStrategy(), 1)
    assert expected != 0
    for found in run_ranks(_evaluate, 3, DDPStrategy(batch_size_is="global"), 3):
        assert abs(found - expected) < 1e-10


def test_replicas_that_wait_for_each_other_are_not_timed(caplog: pytest.LogCaptureFixture) -> None:
    strategy = BalancedDataParallelStrategy(weights="auto")
    with caplog.at_level("INFO"):
        _verify(_fit(MODULES["CLIP"], strategy, 2), _on_one_device(MODULES["CLIP"]))
    assert caplog.text.count("their times can't be measured. Set strategy.weights") == 1
    assert strategy.controller is not None
    assert set(strategy.controller.metrics().values()) == {1.0, 0.5, 0.0}  # efficiency, shares, and no times
