"""Lists that steps of evaluation append to have one element per global batch, as on one device, when the epoch ends."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks
from parity import Case, Net, make_trainer
from pytorch_lightning.utilities import CombinedLoader
from regression import assert_same
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torchmetrics.functional import f1_score

from evener.strategies import (
    BalancedDataParallelStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer


class Collecting(Net):
    """Appends in every way that modules do; keeps what it finds at the end of each evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []
        self.by_name: dict[str, list[Tensor]] = defaultdict(list)
        self.by_loader: list[list[Tensor]] = [[], []]
        self.names: list[str] = []
        self.ends: list[Any] = []

    def on_validation_epoch_start(self) -> None:
        self.outs = []
        for values in (self.by_name, self.names, *self.by_loader):
            values.clear()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        names = [f"{value:.6f}" for value in x[:, 0].tolist()]
        self.outs.append({"loss": loss, "n": len(x), "batch": batch_idx, "pair": (logits, y.numpy()), "names": names})
        self.by_name["probs"].append(logits.softmax(1))
        self.by_name["targets"].append(y)
        self.by_name["right"].append((logits.argmax(1) == y).sum())
        self.by_loader[dataloader_idx].append(logits[y > 0])
        self.names.extend(names)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        probs, targets = torch.cat(self.by_name["probs"]), torch.cat(self.by_name["targets"])
        self.log("f1", f1_score(probs, targets, "multiclass", num_classes=3, average="macro"))
        self.log("mean_loss", torch.stack([out["loss"] for out in self.outs]).mean())
        lists = (self.outs, dict(self.by_name), self.by_loader, self.names)
        self.ends.append(tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray) else leaf, lists))

    on_test_epoch_end = on_validation_epoch_end


def collected(
    strategy: Any, num: int, devices: int, kind: type[pl.Trainer] = Trainer
) -> tuple[list[Any], dict[str, float]]:
    """What a module found in a fit with its sanity check, and a test of two loaders; and what it logged."""
    torch.manual_seed(3)
    case = Case(Collecting, num=num, trainer={"max_epochs": 1, "num_sanity_val_steps": -1})
    module = Collecting().double()
    trainer = make_trainer(case, strategy, kind, devices=devices)
    trainer.fit(module, case.loader(), case.loader())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(module, [case.loader(), DataLoader(case.loader().dataset, batch_size=3)], verbose=False)
    return module.ends, logged


def assert_one_devices(found: tuple[list[Any], dict[str, float]], num: int) -> None:
    ends, logged = collected(SingleDeviceStrategy(), num, 1)
    assert_same(found[0], ends, 1e-12)
    for name in ("f1", "mean_loss"):
        assert found[1][name] == pytest.approx(logged[name], abs=1e-12 if name == "mean_loss" else 1e-7), name


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (DataParallelStrategy, pl.Trainer),
        (lambda: DataParallelStrategy(threads=True), Trainer),
        (lambda: BalancedDataParallelStrategy(weights=[3, 1]), Trainer),
        (lambda: BalancedDataParallelStrategy(weights=[0, 1]), Trainer),
        (lambda: ModelParallelStrategy(num_microbatches=2), Trainer),
    ],
)
def test_lists_of_replicas_hold_one_device_s_batches(strategy: Any, kind: type[pl.Trainer]) -> None:
    assert_one_devices(collected(strategy(), 9, 2, kind), 9)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "options"),
    [
        (DDPStrategy, 3, {}),  # of the last batch, of one sample, two ranks have none
        (DDPStrategy, 2, {"devices_per_process": 2}),
        (FSDPStrategy, 2, {}),
    ],
)
def test_lists_of_ranks_hold_one_device_s_batches_on_every_rank(
    strategy: Any, num_ranks: int, options: dict[str, Any]
) -> None:
    devices = num_ranks * options.get("devices_per_process", 1)
    for found in run_ranks(collected, num_ranks, strategy(batch_size_is="global", **options), 9, devices):
        assert_one_devices(found, 9)


class Evaluator:
    """Counts what it is given, as those of detection and of language models do."""

    def __init__(self) -> None:
        self.hits: list[Any] = []
        self.classes = {"seen": 0}

    def update(self, logits: Any, y: Any) -> None:
        self.hits.append(logits.argmax(1) == y)
        self.classes["seen"] += len(y)

    def computed(self) -> list[float]:
        found = [torch.cat(self.hits).double().mean().item(), self.classes["seen"]]
        self.hits, self.classes = [], {"seen": 0}
        return found


class Counting(Net):
    """Adds to numbers and a tensor, in its steps of evaluation, clears them in two ways, and has an evaluator."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.num = 0
        self.total: Any = 0.0
        self.counts = torch.zeros(3)
        self.ends: list[Any] = []
        self.evaluator = Evaluator()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.evaluator.update(logits, y)
        self.right += (logits.argmax(1) == y).sum().item()
        self.num += len(y)
        self.total += torch.nn.functional.cross_entropy(logits, y, reduction="sum")
        self.counts += torch.bincount(logits.argmax(1), minlength=3)

    def on_validation_epoch_start(self) -> None:
        self.counts.zero_()

    def on_validation_epoch_end(self) -> None:
        self.ends.append((self.right, self.num, float(self.total), self.counts.tolist(), self.evaluator.computed()))
        self.right, self.num, self.total = 0, 0, 0.0


def _counted(strategy: Any, devices: int) -> list[Any]:
    torch.manual_seed(3)
    case, module = Case(num=9), Counting().double()
    trainer = make_trainer(case, strategy, devices=devices, num_sanity_val_steps=1)
    trainer.fit(module, case.loader(), case.loader())
    return module.ends


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy])
def test_what_evaluations_add_up_is_one_device_s_on_every_rank(strategy: Any) -> None:
    expected = _counted(SingleDeviceStrategy(), 1)
    assert [end[1] for end in expected] == [4, 9, 9]
    of_ranks = run_ranks(_counted, 3, strategy(batch_size_is="global"), 3)
    for found in of_ranks:  # of the last batch, of one sample, two ranks have none
        assert_same(found, expected, 1e-9)


class Failing(Counting):
    """Fails in its second validation, which each rank runs whole."""

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.ends:
            raise ArithmeticError


class Told(pl.Callback):
    num_ranks = 0

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.num_ranks = trainer.world_size


def _failed() -> int:
    case, told = Case(num=9), Told()
    strategy = DDPStrategy(batch_size_is="global")
    with pytest.raises(ArithmeticError):
        make_trainer(case, strategy, devices=2, callbacks=[told]).fit(Failing().double(), case.loader(), case.loader())
    return told.num_ranks


def test_ranks_see_each_other_again_where_an_evaluation_of_each_fails() -> None:
    # Failed before: 1, so that a checkpoint that a failure or a signal leads to would have had one rank's position.
    assert run_ranks(_failed, 2) == [2, 2]


class Appending(Net):
    """Appends what `value` makes of a batch's rows."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.outs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.outs.append(self.value(batch[0]))


def _validated(value: Any, strategy: Any, devices: int = 2, **options: Any) -> Any:
    module, case = Appending(value).double(), Case(num=10)
    make_trainer(case, strategy(**options), devices=devices).validate(module, case.loader(), verbose=False)
    return module.outs


def _sum(x: Tensor) -> Tensor:
    return x.sum(0)


def test_tensors_that_have_no_rows_of_samples_are_of_whole_batches_declared_or_refused() -> None:
    expected = _validated(_sum, SingleDeviceStrategy, 1)
    for options in ({}, {"batch_dims": {"validation_step.outs": "sum"}, "global_view": False}):
        torch.testing.assert_close(_validated(_sum, DataParallelStrategy, **options), expected, rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"validation_step appends to outs .* 4 rows in parts of .*outs: sum"):
        _validated(_sum, DataParallelStrategy, global_view=False)


def _large(x: Tensor) -> Tensor:
    return x.repeat(1, 10_000)


def _fit_with_limit() -> None:
    case, strategy = Case(), DDPStrategy(gather_lists_mb=2.0, batch_size_is="global")
    trainer = make_trainer(case, strategy, devices=2, num_sanity_val_steps=1)
    trainer.fit(Appending(_large).double(), case.loader(), case.loader())


def test_lists_that_are_larger_than_the_limit_are_refused_in_the_sanity_check() -> None:
    # of three batches one is seen there: 3 * 4 * 40,000 numbers of 8 bytes are 3.7 MiB
    match = r"lists that evaluation steps append to hold 4 MiB over all ranks, and strategy.gather_lists_mb=2 "
    with pytest.raises(RankError, match=match):
        run_ranks(_fit_with_limit, 2)


class OfPairs(Net):
    """Appends the samples of two loaders that are read side by side, one loader's after the other's."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outs.append(torch.cat(batch))
        self.middles.append(batch[0].double().median())

    def on_validation_epoch_start(self) -> None:
        self.outs, self.middles = list[Tensor](), list[Tensor]()


def _pairs(strategy: str) -> list[Any]:
    own = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}
    made = DataParallelStrategy() if strategy == "dp" else own[strategy](batch_size_is="global")
    trainer, module = make_trainer(Case(), made, devices=2), OfPairs()
    loaders: Any = CombinedLoader([DataLoader(range(8), 4), DataLoader(range(10, 18), 4)], "max_size")  # type: ignore[arg-type]
    trainer.validate(module, loaders, verbose=False)
    return [[one.tolist() for one in module.outs], [float(one) for one in module.middles]]


@pytest.mark.parametrize("strategy", ["dp", "ddp", "fsdp"])
def test_what_steps_append_that_parts_do_not_make_is_of_whole_batches(strategy: str) -> None:
    # it was joined by parts, 0 1 10 11 2 3 12 13, and medians (the lower of two) were averaged: 0.5 * (0 + 2)
    expected = [[[0, 1, 2, 3, 10, 11, 12, 13], [4, 5, 6, 7, 14, 15, 16, 17]], [1.0, 5.0]]
    for found in run_ranks(_pairs, 2, strategy) if strategy != "dp" else [_pairs(strategy)]:
        assert found == expected


class Trained(Net):
    """Appends in training to one list, and in evaluation keys to a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.nums: list[int] = []
        self.sums: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.nums.append(len(batch[1]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        self.sums.update({round(row[0].item() * 1e6): self(row).sum().item() for row in x})


@pytest.mark.parametrize("strategy", [DataParallelStrategy, lambda: ModelParallelStrategy(num_microbatches=2)])
def test_lists_of_training_steps_have_an_element_per_part(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    case, module = Case(Trained, num=9, trainer={"max_epochs": 1}), Trained().double()
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        make_trainer(case, strategy(), devices=2).fit(module, case.loader(), case.loader())
    assert module.nums == [2, 2, 2, 2, 1]
    assert "training_step appends to nums: an element per part of a batch, not per batch." in caplog.text


def _keyed(strategy: Any, devices: int) -> Any:
    torch.manual_seed(3)
    case, module = Case(num=10), Trained().double()
    make_trainer(case, strategy, devices=devices).validate(module, case.loader(), verbose=False)
    return module.sums


def test_keys_that_evaluations_add_to_a_dictionary_are_all_on_every_rank() -> None:
    expected = _keyed(SingleDeviceStrategy(), 1)
    assert len(expected) == 10
    for found in run_ranks(_keyed, 2, DDPStrategy(batch_size_is="global"), 2):
        assert_same(found, expected, 1e-12)
