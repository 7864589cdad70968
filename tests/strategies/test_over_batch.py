"""`evener.over_batch`: a loss over the batch is one device's under every strategy. The losses are those of the docs."""

import functools
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
_Ended: Any = MODULES.pop("Ended")


class Twice(Base):
    """Two losses over the batch beside a mean, one of them on other numbers of rows."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        first = evener.over_batch(lambda z: z.std(0).sum())(z)
        second = evener.over_batch(lambda z, y: z.amax() * y.double().mean())(z.repeat_interleave(2, 0), y)
        return first + 0.5 * second + 0.1 * z.square().mean()


MODULES["Twice"] = Twice


class Ended(_Ended):
    """Its step returns fractions, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "parts": (outputs["z"].square().mean(), "same")}

    def training_step_end(self, outputs: Any) -> Tensor:
        return super().training_step_end(outputs) * (1 + outputs["parts"][0])


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


IN_ONE_PROCESS: dict[str, tuple[Callable[[], Any], int]] = {
    "dp": (lambda: DataParallelStrategy(), 4),
    "micro_batches": (lambda: ModelParallelStrategy(num_microbatches=3), 2),
    "balanced_dp": (lambda: BalancedDataParallelStrategy(weights=[8, 1]), 2),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("strategy", IN_ONE_PROCESS)
def test_a_loss_over_the_batch_trains_as_on_one_device(strategy: str, name: str) -> None:
    make, devices = IN_ONE_PROCESS[strategy]
    _verify(_fit(MODULES[name], make(), devices), _on_one_device(MODULES[name]))


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


OF_RANKS = {**MODULES, "Ended": Ended}
ACCUMULATED = {"accumulate_grad_batches": 2}


def _fit_all(strategy: str, devices: int, options: dict[str, Any]) -> dict[str, Fitted]:
    made = {"CLIP": MODULES["CLIP"]} if options else OF_RANKS
    return {name: _fit(kind, RANKS[strategy][0](), devices, **options) for name, kind in made.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options"), [*((one, {}) for one in RANKS), ("ddp", ACCUMULATED), ("fsdp", ACCUMULATED)]
)
def test_losses_over_the_batch_train_under_ranks_as_on_one_device(strategy: str, options: dict[str, Any]) -> None:
    num = RANKS[strategy][1]
    for of_a_rank in run_ranks(_fit_all, num, strategy, num * (2 if "_of_" in strategy else 1), options):
        for name, fitted in of_a_rank.items():
            expected = _on_one_device(OF_RANKS[name], **options)
            torch.testing.assert_close(fitted[0], expected[0], rtol=0, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}")
            assert fitted[1].get("val") == pytest.approx(expected[1].get("val"), abs=EXACT), name


@pytest.mark.parametrize("strategy", IN_ONE_PROCESS)
def test_each_forward_pass_has_its_own_batch_under_accumulation(strategy: str) -> None:
    make, devices = IN_ONE_PROCESS[strategy]
    _verify(_fit(MODULES["CLIP"], make(), devices, **ACCUMULATED), _on_one_device(MODULES["CLIP"], **ACCUMULATED))


class WeighedByTokens(Base):
    """A `loss_weight` of its own, which other terms of the loss need."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self.net(x)
        counts = (x > 0).sum(1).double()
        mean = (F.cross_entropy(z, y, reduction="none") * counts).sum() / counts.sum().clamp(min=1)
        loss = mean + evener.over_batch(DOCUMENTED["info_nce"])(z, z.tanh())
        return {"loss": loss, "loss_weight": counts.sum()}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).mean()


@pytest.mark.parametrize("strategy", ["dp", "micro_batches"])
def test_a_loss_weight_beside_a_loss_over_the_batch_weighs_the_other_terms(strategy: str) -> None:
    make, devices = IN_ONE_PROCESS[strategy]
    _verify(_fit(WeighedByTokens, make(), devices), _on_one_device(WeighedByTokens))


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
    assert strategy.controller.state_dict()["num_observed"] == 0
