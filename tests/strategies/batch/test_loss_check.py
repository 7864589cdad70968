"""A loss that is no mean over samples is refused by what samples show; what shows nothing is not."""

import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from typing_extensions import override

from evener.strategies import (
    BalancedDataParallelStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.strategies.batch.checks.loss_check import verify_mean
from evener.trainer import Trainer

SIZES = (2, 3, 2, 4)
MOLECULES = [(torch.arange(1.0, size + 1), i) for i, size in enumerate(SIZES)]


def collated(molecules: list[Any]) -> dict[str, Tensor]:
    """Atoms in a row, and which molecule each belongs to."""
    owner = torch.cat([torch.full((len(atoms),), i) for i, (atoms, _) in enumerate(molecules)])
    labels = torch.tensor([label for _, label in molecules])
    return {"labels": labels, "atoms": torch.cat([atoms for atoms, _ in molecules]), "owner": owner}


LOADER = DataLoader[Any](MOLECULES, 2, collate_fn=collated)  # type: ignore[arg-type]


def by_molecule(batch: dict[str, Tensor]) -> Tensor:
    sums = torch.zeros(len(batch["labels"])).index_add(0, batch["owner"], batch["atoms"])
    return (sums / batch["owner"].bincount()).mean()


def by_atom(batch: dict[str, Tensor]) -> Tensor:
    return batch["atoms"].mean()


def summed(batch: dict[str, Tensor]) -> Tensor:
    return batch["atoms"].sum()


def loss(function: Callable[[Any], Tensor]) -> Callable[[Any, int, Callable[[Tensor], Tensor]], Tensor]:
    return lambda batch, _, read: read(function(batch))


def test_a_mean_over_samples_is_known_to_be_one() -> None:
    assert verify_mean(loss(by_molecule), LOADER, "ddp")


# atoms 1, 2; 1, 2, 3; 1, 2; 1, 2, 3, 4: means 1.5, 2, 1.5, 2.5, of all 22/11; sums 3, 6, 3, 10
@pytest.mark.parametrize(
    ("function", "told"), [(by_atom, "is 1.875, .* together 2"), (summed, "is 5.5, .* together 22")]
)
def test_a_mean_over_atoms_and_a_sum_are_refused(function: Callable[[Any], Tensor], told: str) -> None:
    with pytest.raises(ConfigError, match=f"ddp: the loss is not the mean over samples.* {told}[.]"):
        verify_mean(loss(function), LOADER, "ddp")


def with_entropy(batch: dict[str, Tensor]) -> Tensor:
    """A mean over molecules, and a term of the whole batch that is a ten-thousandth of it: the spread of the labels."""
    return by_molecule(batch) + 1e-4 * batch["labels"].double().var(correction=0)


def test_a_difference_beyond_rounding_shows_neither() -> None:
    assert not verify_mean(loss(with_entropy), LOADER, "ddp")


def spread(batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].double()
    return (labels - labels.mean()).square().sum() / (len(labels) - 1)


def test_a_loss_that_a_sample_alone_has_not_is_said_to_compare_samples() -> None:
    # of 0, 1, 2, 3: (2.25 + 0.25 + 0.25 + 2.25) / 3
    told = r"of a sample alone it is undefined \(nan\), and of 4 together 1.667; if it compares samples"
    with pytest.raises(ConfigError, match=told):
        verify_mean(loss(spread), LOADER, "ddp")


def fails(batch: Any) -> Tensor:
    raise RuntimeError("only in training mode")


@pytest.mark.parametrize("function", [fails, lambda _: torch.tensor(1.0), lambda _: torch.tensor(math.nan)])
def test_what_fails_or_is_the_same_for_all_shows_nothing(function: Callable[[Any], Tensor]) -> None:
    assert not verify_mean(loss(function), LOADER, "ddp")


def test_a_loss_that_draws_random_numbers_shows_nothing() -> None:
    assert not verify_mean(lambda batch, seed, read: read(by_atom(batch)) + seed, LOADER, "ddp")
    noisy = DataLoader[Any](MOLECULES, 2, collate_fn=lambda some: {"atoms": torch.rand(len(some)) * random.random()})  # type: ignore[arg-type]
    assert not verify_mean(loss(by_atom), noisy, "ddp")


def test_samples_that_cannot_be_chosen_show_nothing() -> None:
    assert not verify_mean(loss(by_atom), iter([1]), "ddp")


class Atoms(pl.LightningModule):
    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(1, 1, bias=False), function
        self.steps, self.seen = 0, list[int]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen.append(len(batch["labels"]))
        value = self.function({**batch, "atoms": self.layer(batch["atoms"].reshape(-1, 1)).reshape(-1)})
        self.log("value", value.detach(), batch_size=len(batch["labels"]))
        return value

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(function: Callable[[Any], Tensor], **options: Any) -> Any:
    torch.manual_seed(0)
    module = Atoms(function)
    trainer = Trainer(
        strategy=DDPStrategy(batch_size_is="global", timeout_s=60, **options), devices=2, accelerator="cpu",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, LOADER)
    except ConfigError as exc:
        return trainer.global_step, str(exc)
    return trainer.global_step, module.steps, module.seen, module.training


def _all_trained() -> list[Any]:
    warnings.simplefilter("ignore")
    return [trained(by_molecule), trained(by_atom), trained(by_atom, verify_loss=False)]


def test_ranks_refuse_it_before_the_first_step_and_leave_no_trace_of_the_trial() -> None:
    for by_molecules, refused, not_verified in run_ranks(_all_trained, 2, timeout_s=120):
        assert by_molecules == not_verified == (2, 2, [1, 1], True)
        assert refused[0] == 0
        assert "strategy.verify_loss=false" in refused[1]


def _exchanges() -> list[int]:
    warnings.simplefilter("ignore")
    exchange, counts = torch.distributed.gather, list[int]()

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return exchange(*args, **kwargs)

    torch.distributed.gather = counting
    for verify_loss in (True, False):
        counts.append(0)
        trained(by_molecule, verify_loss=verify_loss)
    return counts


def test_ranks_exchange_nothing_about_a_loss_that_is_not_to_be_verified() -> None:
    # Cause: whether the loss is verified was asked where a rank closes its check, and what it found was exchanged.
    for verified, not_verified in run_ranks(_exchanges, 2, timeout_s=120):
        assert verified - not_verified == 1


def by_molecule_and_summed_over_ranks(batch: dict[str, Tensor]) -> Tensor:
    value = by_molecule(batch)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(value.detach().clone())
    return value


def _trained_with_collectives(num_ranks: int) -> float:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = Atoms(by_molecule_and_summed_over_ranks)
    molecules = [(torch.arange(1.0, size + 1), i) for i, size in enumerate((2, 1, 3, 1))]
    strategy = DDPStrategy(batch_size_is="global", timeout_s=60) if num_ranks > 1 else SingleDeviceStrategy()
    trainer = Trainer(
        strategy=strategy, devices=num_ranks, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader[Any](molecules, 2, collate_fn=collated))  # type: ignore[arg-type]
    return float(module.layer.weight.detach())


def test_the_trial_of_one_rank_meets_no_collective_of_the_others() -> None:
    # Cause: rank 1, whose molecules have one atom each, tries nothing; rank 0's six trials met its next collectives.
    (expected,) = run_ranks(_trained_with_collectives, 1, 1)
    assert run_ranks(_trained_with_collectives, 2, 2, timeout_s=120) == pytest.approx([expected] * 2, abs=1e-6)


class Labelled(Atoms):
    """Logs the mean label of each step by a metric."""

    def __init__(self) -> None:
        super().__init__(by_molecule)
        self.label, self.means = MeanMetric(), list[float]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.label(batch["labels"])
        self.log("label", self.label, on_step=True, on_epoch=False, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.means.append(float(self.trainer.callback_metrics["label"]))


def _label_means() -> list[float]:
    warnings.simplefilter("ignore")
    module = Labelled()
    trainer = Trainer(
        strategy=DDPStrategy(batch_size_is="global", timeout_s=60), devices=2, accelerator="cpu",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, LOADER)
    return module.means


def test_the_trial_leaves_a_metrics_value_of_the_first_step_alone() -> None:
    for means in run_ranks(_label_means, 2, timeout_s=120):
        assert means == pytest.approx([0.5, 2.5], abs=1e-6)  # of 0 and 1, then of 2 and 3; the trial's are 0 and 3


LABELS = (0, 1, 0, 2)
CLASSES = DataLoader[Any]([(torch.tensor([1.0 + i]), label) for i, label in enumerate(LABELS)], 2)  # type: ignore[arg-type]


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "weights of classes": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 3.0])),
    "ignored class": nn.CrossEntropyLoss(ignore_index=2),
    "root": lambda x, y: (x.square().sum(1) + y).mean().sqrt(),
    "contrastive": lambda x, y: nn.functional.cross_entropy(x @ x.T, torch.arange(len(x))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples_show_losses_of_plain_batches_that_are_no_means(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1, 3)

    def loss_of(batch: Any, _: int, read: Callable[[Tensor], Tensor]) -> Tensor:
        return read(FUNCTIONS[name](layer(batch[0]), batch[1]))

    if name == "mean":
        verify_mean(loss_of, CLASSES, "ddp")  # which raises no error
    elif name == "contrastive":
        with pytest.raises(ConfigError, match=r"of each of 4 samples alone it is 0, and .* if it compares samples"):
            verify_mean(loss_of, CLASSES, "ddp")
    else:
        with pytest.raises(ConfigError, match="the loss is not the mean over samples"):
            verify_mean(loss_of, CLASSES, "ddp")


CERTAIN = {"weights of classes", "ignored class"}
"""Of which the graph shows that they are no means."""


SENTENCES = torch.tensor([[0, -100, -100], [1, 2, -100], [2, 1, -100], [0, 1, 1]])
"""Of 1, 2, 2 and 3 words, padded to 3."""


def of_new_scores(labels: Tensor, weight: nn.Parameter, **options: Any) -> Tensor:
    """Scores of zero: each target's loss is log 3, and each sample's, whatever counts."""
    return nn.functional.cross_entropy(weight.expand(labels.numel(), 3), labels.flatten(), **options)


NEW: dict[str, Callable[[Tensor, nn.Parameter], Tensor]] = {
    "smoothed": lambda x, w: of_new_scores(x, w, label_smoothing=0.1),
    "scaled": lambda x, w: 0.5 * of_new_scores(x, w),
    "masked": lambda x, w: of_new_scores(x.clamp(min=0), w, reduction="none")[x.flatten() >= 0].mean(),
}


@pytest.mark.parametrize("name", NEW)
def test_gradients_show_what_losses_that_are_alike_do_not(name: str) -> None:
    weight, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2))
    loader = DataLoader[Any](SENTENCES, 2)  # type: ignore[arg-type]

    def compute(batch: Tensor, _: int, read: Callable[[Tensor], Tensor]) -> Tensor:
        return read(NEW[name](batch, weight))

    assert not verify_mean(compute, loader, "ddp")
    with pytest.raises(ConfigError, match="the losses of 4 samples are nearly alike, but the gradient"):
        verify_mean(compute, loader, "ddp", [weight, unused])
    assert weight.grad is None


def test_gradients_show_that_a_loss_is_a_mean() -> None:
    weight, loader = nn.Parameter(torch.zeros(3)), DataLoader[Any](SENTENCES[:, :1], 2)  # type: ignore[arg-type]

    def compute(batch: Tensor, seed: int, read: Callable[[Tensor], Tensor]) -> Tensor:
        return read(of_new_scores(batch, weight))

    assert verify_mean(compute, loader, "ddp", [weight])
    assert not verify_mean(lambda *args: compute(*args) * torch.rand(()), loader, "ddp", [weight])


def test_gradients_of_samples_that_are_alike_show_nothing() -> None:
    weight, loader = nn.Parameter(torch.zeros(3)), DataLoader[Any](torch.ones(4, 1, dtype=torch.int64), 2)  # type: ignore[arg-type]
    assert not verify_mean(lambda batch, _, read: read(of_new_scores(batch, weight)), loader, "ddp", [weight])


class Classifier(pl.LightningModule):
    """Two layers, so that it can be cut into stages; counts its training steps."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 3))
        self.loss_function, self.calls = FUNCTIONS[name], list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append(len(batch[0]))
        return self.loss_function(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


CLASSES_IN_ONE_BATCH = DataLoader[Any](CLASSES.dataset, 4)
ONE_PROCESS: dict[str, Callable[..., Any]] = {
    "dp": DataParallelStrategy,
    "balanced_dp": lambda **options: BalancedDataParallelStrategy(weights=[1, 3], **options),
    "model_parallel": lambda **options: ModelParallelStrategy(num_microbatches=2, **options),
}


def classified(strategy: Any, name: str) -> tuple[int, str, list[int]]:
    """Train for one step: the steps that were taken, the error, and the samples of each training step."""
    module = Classifier(name)
    trainer = Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, CLASSES_IN_ONE_BATCH)
    except ConfigError as exc:
        return trainer.global_step, str(exc), module.calls
    return trainer.global_step, "", module.calls


def assert_refused(name: str, strategy: str, found: tuple[int, str, list[int]], parts: list[int]) -> None:
    num_steps, told, calls = found
    if name == "mean":
        assert (num_steps, told, sorted(calls)) == (1, "", parts)  # no trial is made
    else:
        assert num_steps == 0
        assert told.startswith(f"{strategy}: the loss is not the mean over samples")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("strategy", ONE_PROCESS)
def test_strategies_of_one_process_refuse_what_is_no_mean(strategy: str, name: str) -> None:
    parts = {"dp": [2, 2], "balanced_dp": [1, 3], "model_parallel": [2, 2]}
    assert_refused(name, strategy, classified(ONE_PROCESS[strategy](), name), parts[strategy])
    assert classified(ONE_PROCESS[strategy](verify_loss=False), name)[0] == 1


def _classified_on_ranks() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {name: classified(DDPStrategy(batch_size_is="global", timeout_s=60), name) for name in FUNCTIONS}


def test_ranks_refuse_what_is_no_mean() -> None:
    for found in run_ranks(_classified_on_ranks, 2, timeout_s=120):
        for name, result in found.items():
            assert_refused(name, "ddp", result, [2])


class Manual(Classifier):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def _told_of_manual_losses() -> dict[str, bool]:
    warnings.simplefilter("ignore")
    told = dict[str, bool]()
    for name in FUNCTIONS.keys() - CERTAIN:
        log = _Lines()
        logging.getLogger("evener.strategies.batch.checks.loss_check").addHandler(log)
        trainer = Trainer(
            strategy=DDPStrategy(batch_size_is="global", timeout_s=60), devices=2, accelerator="cpu", max_steps=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Manual(name), CLASSES_IN_ONE_BATCH)
        logging.getLogger("evener.strategies.batch.checks.loss_check").removeHandler(log)
        told[name] = any("nothing shows that the loss is a mean over samples" in line for line in log.lines)
    return told


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_what_may_be_no_mean_is_told_in_manual_optimization() -> None:
    told, _ = run_ranks(_told_of_manual_losses, 2, timeout_s=120)  # rank 0 tells what only rank 1 sees
    assert told == {name: name != "mean" for name in FUNCTIONS.keys() - CERTAIN}


class Words(pl.LightningModule):
    """Predicts three classes of words from nothing, at first alike: each target's loss is log 3."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.layers = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3, bias=False))
        nn.init.zeros_(self.layers[1].weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        scores = self.layers(torch.ones(batch.numel(), 1))
        loss = nn.functional.cross_entropy(scores, batch.flatten())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Stream(IterableDataset[Tensor]):
    """No sample of it can be chosen."""

    @override
    def __iter__(self) -> Iterator[Tensor]:
        return iter(SENTENCES)


def padded(strategy: Any, automatic: bool = True) -> tuple[str, bool]:
    """The error, and whether the weights are those of the beginning."""
    module = Words(automatic)
    trainer = Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, DataLoader[Any](Stream(), 4))
    except ConfigError as exc:
        return str(exc), trainer.global_step == 0
    return "", False


def _padded_on_ranks() -> list[tuple[str, bool]]:
    warnings.simplefilter("ignore")
    strategies = [DDPStrategy, FSDPStrategy]
    found = [padded(one(batch_size_is="global", timeout_s=60)) for one in strategies]
    return [*found, padded(DDPStrategy(batch_size_is="global", timeout_s=60), automatic=False)]


def assert_padding_is_refused(strategy: str, found: tuple[str, bool]) -> None:
    told, is_untrained = found
    assert told.startswith(f"{strategy}: the loss is not the mean over samples")
    assert "3 of 6 targets count" in told or "5 of 6 targets count" in told
    assert is_untrained


@pytest.mark.parametrize("strategy", ["dp", "model_parallel"])
def test_ignored_targets_are_refused_where_no_sample_shows_it(strategy: str) -> None:
    assert_padding_is_refused(strategy, padded(ONE_PROCESS[strategy]()))


def test_ranks_refuse_ignored_targets_where_no_sample_shows_it() -> None:
    for found in run_ranks(_padded_on_ranks, 2, timeout_s=120):
        for strategy, one in zip(("ddp", "fsdp", "ddp"), found, strict=True):
            assert_padding_is_refused(strategy, one)
