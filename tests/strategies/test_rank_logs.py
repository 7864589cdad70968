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
from regression import Net, Numbered, Points, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric

from evener.strategies import (
    BalancedDDPStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
)

PLANS: dict[str, tuple[int, Any]] = {
    "ddp": (2, lambda **options: DDPStrategy(batch_size_is="global", **options)),
    "unused": (2, lambda **options: DDPStrategy(batch_size_is="global", find_unused_parameters=True, **options)),
    "weights": (2, lambda **options: BalancedDDPStrategy([1, 3], **options)),
    "replicas": (4, lambda **options: DDPStrategy(batch_size_is="global", devices_per_process=2, **options)),
    "stages": (4, lambda **options: DDPModelParallelStrategy(batch_size_is="global", num_microbatches=2, **options)),
    "one microbatch": (4, lambda **options: DDPModelParallelStrategy(batch_size_is="global", **options)),
}


class Tokens(pl.LightningModule):
    """A loss per token, logged in many ways, with values of other types beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.steps: list[dict[str, float]] = []

    def errors(self, batch: Any) -> Tensor:
        return (self.net(batch[0]).squeeze(1) - batch[0].sum(1)) ** 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = (batch[0] > -0.5).sum(1)
        loss = (self.errors(batch) * tokens).sum() / tokens.sum()
        both: Any = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("loss", loss, **both)
        self.log("detached", loss.detach(), batch_size=len(batch[0]), **both)
        self.log("constant", loss, batch_size=4, **both)
        self.log("mean", self.errors(batch).mean(), **both)
        self.log("single", self.errors(batch).mean().float(), sync_dist=True)
        self.log("whole", (batch[1] == 1).sum(), sync_dist=True, reduce_fx="sum")
        if batch_idx % 2:
            loss += 0.5  # what was logged stays as it was
        return {"loss": loss, "loss_weight": tokens.sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = self.trainer.callback_metrics
        self.steps.append({name: float(value) for name, value in logged.items() if not name.endswith("_epoch")})
        self.log("after", batch[0].mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    module: Any, strategy: Any, devices: int, num: int, batch_size: int, ckpt_path: str | None = None, **options: Any
) -> Any:
    trainer = quiet_trainer(strategy, devices, **options)
    trainer.fit(module, DataLoader(Samples(num, as_tuple), batch_size), ckpt_path=ckpt_path)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.steps


@functools.cache
def on_one_device(module: type[Any], num: int, **options: Any) -> Any:
    return fit(module(), SingleDeviceStrategy(), 1, num, 4, **options)


def assert_same(found: Any, expected: Any) -> None:
    (epoch, steps), (expected_epoch, expected_steps) = found, expected
    assert epoch == pytest.approx(expected_epoch, rel=2e-7)  # Lightning keeps numbers of samples in float32
    assert len(steps) == len(expected_steps)
    for step, expected_step in zip(steps, expected_steps, strict=True):
        assert step == pytest.approx(expected_step, rel=2e-7)


class Labels(Tokens):
    """A mean over valid labels: by chance they are all that a rank has, in some batches and not in others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        valid = batch[0][:, 0] > -0.5
        num = valid.sum()
        loss = (self.errors(batch) * valid).sum() / num.clamp(min=1)
        both: Any = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("valid", loss, batch_size=int(num), **both)
        self.log("samples", loss, batch_size=len(batch[0]), **both)
        self.log("constant", loss, batch_size=4, **both)
        self.log("counted", loss, **both)
        self.log("sum_epoch", num.double(), batch_size=4, reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss, "loss_weight": num}


def _fit_and_save(path: str) -> None:
    """Save after the second of three batches, whose labels are all valid on rank 0 in one and ignored in the other."""
    module = Labels()
    save = LambdaCallback(on_train_batch_end=lambda trainer, _, out, batch, i: i == 1 and trainer.save_checkpoint(path))
    options: Any = {"max_epochs": 1, "callbacks": [save]}
    fit(module, BalancedDDPStrategy([1, 3], timeout_s=120), 2, 12, 4, **options)


def _resume(path: str, num_ranks: int) -> Any:
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    return fit(Labels(), strategy, num_ranks, 12, 4, max_epochs=1, ckpt_path=path)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resumed_epoch_counts_a_loss_as_one_device_does(num_ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected, _ = on_one_device(Labels, 12, max_epochs=1)
    run_ranks(_fit_and_save, 2, path)
    found = run_ranks(_resume, 2, path, 2) if num_ranks > 1 else [_resume(path, 1)]
    names = [f"{name}_epoch" for name in ("valid", "samples", "constant", "counted", "sum")]
    for epoch, _ in found:
        assert [epoch[name] for name in names] == pytest.approx([expected[name] for name in names], rel=2e-7)


class Searching(Tokens):
    """With an optimizer that calls its closure several times per step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class LogsBetween(Searching):
    """Logs in another hook after each call, for which Lightning drops what the first batch's earlier calls logged."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hook", 1.0)


class BeforeBackward(Tokens):
    """Logs the loss that `on_before_backward` is given."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.errors(batch).mean()

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("given", loss, on_step=True, on_epoch=True, sync_dist=True)


def _fit_module(module: type[Tokens], plan: str, num: int, options: dict[str, Any]) -> Any:
    devices, strategy = PLANS[plan]
    return fit(module(), strategy(timeout_s=120), devices, num, 4, **options)


STOCK = {"lean": False}


@pytest.mark.parametrize(
    ("module", "plan", "num", "options"),
    [
        # A loss with `loss_weight` was weighted by samples; a rank without samples exchanged values of another dtype,
        # so that ranks waited for each other; values logged after the step counted its stand-in's samples, and were
        # not weighted by ranks' samples at all.
        *((Tokens, plan, 17, {}) for plan in PLANS),
        (Tokens, "ddp", 21, {"accumulate_grad_batches": 2, "exact_accumulation": True}),
        (Tokens, "replicas", 21, {"accumulate_grad_batches": 2}),
        # A number of labels as large as the rank's part of the batch was taken for the number of samples.
        *((Labels, plan, 17, options) for plan, options in (*((plan, {}) for plan in PLANS), ("ddp", STOCK))),
        # Only the loss of a closure's last call had the module's `loss_weight`; the epoch's mean is over all calls.
        (Searching, "ddp", 17, {}),
        (LogsBetween, "ddp", 17, {}),
        # The hook was given the mean times the rank's share, by which `self.log` weighs once more.
        *((BeforeBackward, plan, 17, {}) for plan in ("ddp", "weights", "stages")),
        (BeforeBackward, "ddp", 17, STOCK),
    ],
)
def test_what_is_logged_is_one_devices(module: type[Tokens], plan: str, num: int, options: dict[str, Any]) -> None:
    expected = on_one_device(module, num, **({} if options == STOCK else options))
    for found in run_ranks(_fit_module, 2, module, plan, num, options):
        assert_same(found, expected)


class Own(Tokens):
    """Logs by step what each rank has, without `sync_dist`."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.errors(batch).mean()
        self.metric(loss.detach())
        self.log("loss", loss)
        self.log("both", loss.detach(), on_step=True, on_epoch=True)
        self.log("number", loss.item())
        self.log("single", loss.detach().float(), on_step=True, on_epoch=True)
        self.log("largest", loss.detach(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("sum", loss.detach(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("metric", self.metric)
        if batch_idx == 0:
            self.log("first", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.callback_metrics
        self.steps.append({name: float(value) for name, value in logged.items() if not name.endswith("_epoch")})
        self.steps[-1]["bytes of single"] = logged["single_step"].element_size()


def _fit_own(strategy: Any, devices: int, folder: str) -> Any:
    best = ModelCheckpoint(folder, monitor="loss", every_n_train_steps=1, filename="{step}")
    # 4, 4 and 1 samples: rank 0 has 1, 1 and none
    found = fit(Own(), strategy, devices, 9, 4, max_epochs=1, callbacks=[best], enable_checkpointing=True)
    return found, None if best.best_model_score is None else float(best.best_model_score), best.best_model_path


def test_a_rank_without_samples_shows_what_the_others_logged(tmp_path: Path) -> None:
    # It showed 0.0, which a checkpoint that monitors the loss kept as the best.
    (epoch, steps), _, _ = _fit_own(SingleDeviceStrategy(), 1, str(tmp_path / "single"))
    first, second = run_ranks(_fit_own, 2, BalancedDDPStrategy([1, 3], timeout_s=120), 2, str(tmp_path / "ranks"))
    for (found_epoch, found_steps), _, path in (first, second):
        last, expected = found_steps[-1], steps[-1]
        names = ("loss", "both_step", "number", "largest_step", "sum_step", "metric", "single_step", "bytes of single")
        assert {name: last[name] for name in names} == pytest.approx({name: expected[name] for name in names})
        assert last["first"] == found_steps[0]["first"]
        assert found_epoch["both_epoch"] == pytest.approx(epoch["both_epoch"], rel=1e-6)
        assert "step=3" not in path or steps[-1]["loss"] == min(step["loss"] for step in found_steps)
    # both ranks' sums and maxima: the samples of the last batch counted once
    assert first[0][0]["sum_epoch"] == pytest.approx(
        sum(step["sum_step"] for step in first[0][1][:2]) + sum(step["sum_step"] for step in second[0][1])
    )


class Loaders(Net):
    """Logs values of each of its validation loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        index = batch[2].double()
        self.largest(index)
        self.log("index_mean", index.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("index_root", index.square().mean().sqrt())
        self.log("index_largest", self.largest)


def _logged_indices(nums: tuple[int, ...], num_ranks: int) -> Any:
    strategy = DDPStrategy(timeout_s=60, batch_size_is="global") if num_ranks > 1 else SingleDeviceStrategy()
    logger = Points()
    trainer = quiet_trainer(strategy, num_ranks, max_epochs=2, logger=logger)
    loaders = [DataLoader(Numbered(num), 2) for num in nums]
    module = Loaders()
    trainer.fit(module, DataLoader(Numbered(4), 2), loaders)
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if "index" in name}
    whole = trainer.validate(module, loaders, verbose=False)
    steps = [{name: value for name, value in values.items() if "_step" in name} for _, values in logger.points]
    return found, whole, [values for values in steps if values]


@pytest.mark.parametrize("nums", [(4, 1), (1, 1), (4, 1, 4), (1, 4, 1)])
def test_a_loader_without_a_sample_for_a_rank_is_validated(nums: tuple[int, ...]) -> None:
    """Ranks exchanged the values of a loader if it had given them a batch, and with the next loader's first batch."""
    expected, whole, steps = _logged_indices(nums, 1)
    if nums == (4, 1, 4):
        assert expected["index_root/dataloader_idx_2"] == pytest.approx((0.5**0.5 + 6.5**0.5) / 2)  # 1.628; was 1.5
    for rank, (found, parts, rank_steps) in enumerate(run_ranks(_logged_indices, 2, nums, 2)):
        assert found == pytest.approx(expected, abs=1e-10)
        for part, one in zip(parts, whole, strict=True):
            assert part == pytest.approx(one, abs=1e-10)
        if not rank:
            assert rank_steps == [pytest.approx(one, abs=1e-10) for one in steps]


class Shown(Net):
    """Shows a value of each batch of a validation in the bar, and logs another one."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        error = ((self.net(x) - y) ** 2).mean()
        self.log("shown", error, on_step=True, prog_bar=True, logger=False, sync_dist=True)
        self.log("both", error, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)


def _bar_of(strategy: Any, devices: int) -> dict[str, float]:
    trainer = quiet_trainer(strategy, devices)
    trainer.validate(Shown(), DataLoader(Numbered(8), 4), verbose=False)
    return {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def test_after_a_validation_the_bar_shows_the_last_global_batch() -> None:
    """It kept rank 0's own value, although `sync_dist=True` asked for the batch's."""
    first, _ = run_ranks(_bar_of, 2, BalancedDDPStrategy([1, 3], timeout_s=60), 2)
    assert first == pytest.approx(_bar_of(SingleDeviceStrategy(), 1), rel=1e-10)


class Counts(Net):
    """Trains a loss that parts of a batch don't make, and counts what it tests."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().median()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("num", float(len(batch[0])), reduce_fx="sum")


def _counted() -> list[float]:
    trainer, loader = quiet_trainer(DDPStrategy(batch_size_is="global"), 2, max_epochs=1), DataLoader(Numbered(9), 4)
    module, found = Counts(), list[float]()
    for _ in range(2):
        found += [values["num"] for values in trainer.test(module, loader, verbose=False)]
        trainer.fit(module, loader)
    return found


def test_a_run_whose_batches_are_whole_logs_sums_once_after_a_run_in_parts() -> None:
    """Cause: results kept from the first run whether ranks share batches, and counted each rank's whole sum: 18."""
    assert run_ranks(_counted, 2) == [[9.0, 9.0], [9.0, 9.0]]
