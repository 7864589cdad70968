"""What ranks log equals what one device logs: weighted losses, ranks without samples, hooks around the step."""

import functools
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from parity import FEATURES, Samples, as_tuple
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
from regression import Net, Numbered, Points, trainer_of
from regression import assert_same as same
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric


class Labels(pl.LightningModule):
    """A mean over valid labels, logged in many ways; by chance they are all that a rank has, in some batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.steps: list[dict[str, float]] = []

    def errors(self, batch: Any) -> Tensor:
        return (self.net(batch[0]).squeeze(1) - batch[0].sum(1)) ** 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        valid = batch[0][:, 0] > -0.5
        num = valid.sum()
        loss = (self.errors(batch) * valid).sum() / num.clamp(min=1)
        both: Any = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("loss", loss, **both)
        self.log("valid", loss, batch_size=int(num), **both)
        self.log("samples", loss, batch_size=len(batch[0]), **both)
        self.log("detached", loss.detach(), batch_size=len(batch[0]), **both)
        self.log("constant", loss, batch_size=4, **both)
        self.log("one", loss, batch_size=1, **both)
        self.log("of_samples", self.errors(batch).sum(), batch_size=len(batch[0]), **both)
        self.log("mean", self.errors(batch).mean(), **both)
        self.log("single", self.errors(batch).mean().float(), sync_dist=True)
        own = torch.float64 if self.global_rank else torch.float32  # ranks may hold values of different types
        self.log("own", self.errors(batch).mean().to(own), sync_dist=True)
        self.log("whole", (batch[1] == 1).sum(), sync_dist=True, reduce_fx="sum")
        self.log("sum_epoch", num.double(), batch_size=4, reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx % 2:
            loss += 0.5  # what was logged stays as it was
        return {"loss": loss, "loss_weight": num}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep_step()
        self.log("after", batch[0].mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")

    def keep_step(self) -> None:
        logged = self.trainer.callback_metrics
        self.steps.append({name: float(value) for name, value in logged.items() if not name.endswith("_epoch")})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(name: str, module: Any, num: int, ckpt_path: str | None = None, **options: Any) -> Any:
    trainer = trainer_of(name, **options)
    trainer.fit(module, DataLoader(Samples(num, as_tuple), 4), ckpt_path=ckpt_path)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.steps


@functools.cache
def on_one_device(module: type[Any], num: int, **options: Any) -> Any:
    return fit("single", module(), num, **options)


def assert_same(found: Any, expected: Any) -> None:
    (epoch, steps), (expected_epoch, expected_steps) = found, expected
    assert epoch == pytest.approx(expected_epoch, rel=1e-6)  # Lightning keeps numbers, and those of samples, in float32
    assert len(steps) == len(expected_steps)
    for step, expected_step in zip(steps, expected_steps, strict=True):
        assert step == pytest.approx(expected_step, rel=1e-6)


def _fit_and_save(path: str) -> None:
    """Save after the second of three batches, whose labels are all valid on rank 0 in one and ignored in the other."""
    save = LambdaCallback(on_train_batch_end=lambda trainer, _, out, batch, i: i == 1 and trainer.save_checkpoint(path))
    fit("weights", Labels(), 12, max_epochs=1, callbacks=[save])


def _resume(strategy: str, path: str) -> Any:
    return fit(strategy, Labels(), 12, path, max_epochs=1)


def test_a_resumed_epoch_counts_a_loss_as_one_device_does(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected, _ = on_one_device(Labels, 12, max_epochs=1)
    run_ranks(_fit_and_save, 2, path)
    names = [f"{name}_epoch" for name in ("valid", "samples", "constant", "loss", "sum")]
    for epoch, _ in [_resume("single", path), *run_ranks(_resume, 2, "ddp", path)]:
        assert [epoch[name] for name in names] == pytest.approx([expected[name] for name in names], rel=2e-7)


class BeforeBackward(Labels):
    """Logs the loss that `on_before_backward` is given."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.errors(batch).mean()

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("given", loss, on_step=True, on_epoch=True, sync_dist=True)


def _fit_module(name: str, module: type[Labels], num: int, options: dict[str, Any]) -> Any:
    return fit(name, module(), num, **options)


RANKS = ("ddp", "weights", "replicas", "stages")
STOCK = {"lean": False}


@pytest.mark.parametrize(
    ("module", "strategy", "num", "options"),
    [
        # A rank weighted its values by a constant `batch_size`, whatever its share of the batch; the sum of a last
        # batch of one sample, of which a rank with two devices had none, counted twice.
        # A loss with `loss_weight` was weighted by samples; a rank without samples exchanged values of another dtype,
        # so that ranks waited for each other; values logged after the step counted its stand-in's samples, and were
        # not weighted by ranks' samples at all; as many labels as samples of a rank were taken for their number.
        # Where no rank had a label (the last of 21), the loss was nan, and counted for nothing.
        *((Labels, name, 17, {}) for name in RANKS),
        (Labels, "ddp", 21, {"accumulate_grad_batches": 2, "exact_accumulation": True}),
        (Labels, "replicas", 21, {"accumulate_grad_batches": 2}),
        (Labels, "ddp", 17, STOCK),
        # The hook was given the mean times the rank's share, by which `self.log` weighs once more.
        *((BeforeBackward, name, 17, {}) for name in ("weights", "stages")),
        (BeforeBackward, "ddp", 17, STOCK),
    ],
)
def test_what_is_logged_is_one_devices(module: type[Labels], strategy: str, num: int, options: dict[str, Any]) -> None:
    expected = on_one_device(module, num, **({} if options == STOCK else options))
    for found in run_ranks(_fit_module, 2, strategy, module, num, options):
        assert_same(found, expected)


class Own(Labels):
    """Logs by step what each rank has, without `sync_dist`; one value is monitored."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.errors(batch).mean()
        self.metric(loss.detach())
        self.log("loss", loss)
        self.log("largest", loss.detach(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("metric", self.metric)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.keep_step()


def _fit_own(strategy: str, folder: str) -> Any:
    best = ModelCheckpoint(folder, monitor="loss", every_n_train_steps=1, filename="{step}")
    # 4, 4 and 1 samples: rank 0 has 1, 1 and none
    found = fit(strategy, Own(), 9, max_epochs=1, callbacks=[best], enable_checkpointing=True)
    return *found, best.best_model_score


def test_a_rank_without_samples_has_what_is_monitored_and_goes_on_showing_its_last_values(tmp_path: Path) -> None:
    # It showed 0.0, which a checkpoint that monitors the loss kept as the best.
    _, steps, best = _fit_own("single", str(tmp_path / "single"))
    ranks = run_ranks(_fit_own, 2, "weights", str(tmp_path / "ranks"))
    for rank, (found_epoch, found, found_best) in enumerate(ranks):
        assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in steps])
        assert found_best == pytest.approx(best)
        assert found_epoch["largest_epoch"] >= found[1]["largest_step"] > 0
        own = [(step["largest_step"], step["metric"]) for step in found]
        assert (own[2] == own[1]) is (rank == 0)


class Loaders(Net):
    """Logs values of each of its validation loaders, and shows some in the bar."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        index = batch[2].double()
        self.largest(index)
        self.log("index_mean", index.mean(), on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("index_root", index.square().mean().sqrt())
        self.log("index_largest", self.largest)


def _logged_indices(strategy: str, nums: tuple[int, ...]) -> Any:
    trainer = trainer_of(strategy, max_epochs=2, logger=Points())
    loaders = [DataLoader(Numbered(num), 2) for num in nums]
    module = Loaders()
    trainer.fit(module, DataLoader(Numbered(4), 2), loaders)
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if "index" in name}
    whole = trainer.validate(module, loaders, verbose=False)
    metrics = trainer.logged_metrics | trainer.progress_bar_metrics
    if strategy != "single":
        assert not any("_step" in name for name in metrics), "of steps no rank knows the value"
    return found, whole, {name: float(value) for name, value in metrics.items() if "_step" not in name}


@pytest.mark.parametrize("nums", [(1, 1), (4, 1, 4)])
def test_a_loader_without_a_sample_for_a_rank_is_validated(nums: tuple[int, ...]) -> None:
    """Cause: ranks exchanged the values of a loader if it had given them a batch, and with the next loader's first
    batch."""
    expected = _logged_indices("single", nums)
    if nums == (4, 1, 4):
        assert expected[0]["index_root/dataloader_idx_2"] == pytest.approx((0.5**0.5 + 6.5**0.5) / 2)  # 1.628; was 1.5
    for found in run_ranks(_logged_indices, 2, "ddp", nums):
        same(found, expected, 1e-10)


class Counts(Net):
    """Trains a loss that parts of a batch don't make, and counts what it tests."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().median()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("num", float(len(batch[0])), reduce_fx="sum")


def _counted() -> list[float]:
    trainer, loader = trainer_of("ddp", max_epochs=1), DataLoader(Numbered(9), 4)
    module, found = Counts(), list[float]()
    for _ in range(2):
        found += [values["num"] for values in trainer.test(module, loader, verbose=False)]
        trainer.fit(module, loader)
    return found


def test_a_run_whose_batches_are_whole_logs_sums_once_after_a_run_in_parts() -> None:
    """Cause: results kept from the first run whether ranks share batches, and counted each rank's whole sum: 18."""
    assert run_ranks(_counted, 2) == [[9.0, 9.0], [9.0, 9.0]]


class LogsMedians(pl.LightningModule):
    """Logs what parts of a batch don't make, and needs the hook of the epoch's start."""

    has_begun = False

    def on_validation_epoch_start(self) -> None:
        self.has_begun = True

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.has_begun
        self.log("median", batch.median().double(), batch_size=len(batch))


def _validate_medians() -> list[float]:
    found = []
    for num_workers in (0, 1):
        loader: Any = DataLoader(range(8), 5, num_workers=num_workers)  # type: ignore[arg-type]
        found += trainer_of("ddp").validate(LogsMedians(), loader, verbose=False)
    return [one["median"] for one in found]


def test_the_first_rank_evaluates_whole_batches_where_parts_do_not_make_what_is_logged() -> None:
    # of 0 to 4 the median is 2, of 5 to 7 it is 6; workers had read the first batches in parts by then
    assert run_ranks(_validate_medians, 2) == [[pytest.approx((5 * 2 + 3 * 6) / 8)] * 2] * 2
