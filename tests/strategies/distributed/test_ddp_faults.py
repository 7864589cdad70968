"""Ranks that do not go together are named within the timeout, nothing hangs, and rank 0 alone may read everything."""

import inspect
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from distributed import RankError, run_ranks, run_ranks_unchecked
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import TensorBoardLogger
from regression import Net, Numbered, assert_same, quiet_trainer, trainer_of, weights
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from evener.strategies import DDPStrategy, FSDPStrategy

TIMEOUT_S = 4.0
HANG_S = 16.0
"""Seconds that a rank is away; it ends then, so that nothing waits for longer."""
HARD_TIMEOUT_S = 180.0
"""Seconds after which a rank is killed, and its exit code is not 1 but -9."""


class Faulty(Net):
    """Rank 1 does something else than rank 0 in step 2."""

    def __init__(self, fault: Callable[["Faulty"], None]) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            self.fault(self)
        return super().training_step(batch, batch_idx)


def save(module: Faulty) -> None:
    module.trainer.save_checkpoint("/dev/null")


def die(module: Faulty) -> None:
    os._exit(9)


def log_another_key(module: Faulty) -> None:
    module.log("another", 7.0, on_step=False, on_epoch=True, sync_dist=True)


def _train(fault: Callable[[Faulty], None]) -> dict[str, Any]:
    trainer = quiet_trainer(DDPStrategy(timeout_s=TIMEOUT_S), 2, max_epochs=1)
    trainer.fit(Faulty(fault), DataLoader(Numbered(), 2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _never_join() -> None:
    if os.environ["RANK"] == "1":
        ends = time.monotonic() + HANG_S
        while time.monotonic() < ends and len(psutil.Process(os.getppid()).children()) > 1:  # the other rank is there
            time.sleep(0.05)
        os._exit(9)
    _train(die)


FAULTS: dict[Callable[[Faulty], None], str] = {
    die: r"rank 1 is gone",
    save: r"rank 1 is at step 2, test_ddp_faults.py:\d+ in save",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_rank_that_goes_its_own_way_is_named_by_the_others(fault: Callable[[Faulty], None]) -> None:
    outcome = run_ranks_unchecked(_train, 2, fault, timeout_s=HARD_TIMEOUT_S)[0]
    assert isinstance(outcome, RankError)
    assert "exit code 1" in str(outcome).splitlines()[0], outcome
    with pytest.raises(RankError, match=FAULTS[fault]):
        raise outcome


def test_an_epochs_value_that_one_rank_logs_is_the_mean_over_its_samples() -> None:
    assert [found["another"] for found in run_ranks(_train, 2, log_another_key)] == [7.0, 7.0]


def test_a_rank_that_never_joins_is_named() -> None:
    outcome = run_ranks_unchecked(_never_join, 2, timeout_s=HARD_TIMEOUT_S)[0]
    with pytest.raises(RankError, match=rf"rank 1 did not join within {TIMEOUT_S:g} s \(1 of 2 did\)"):
        raise outcome


class RankMetric(Net):
    """Logs a metric that rises on rank 1 only."""

    def on_train_epoch_end(self) -> None:
        self.log("val", float(self.current_epoch) if self.global_rank == 1 else -float(self.current_epoch))


def _stop_early() -> int:
    trainer = trainer_of("ddp", max_epochs=10, callbacks=[EarlyStopping("val", patience=2)])
    trainer.fit(RankMetric(), DataLoader(Numbered(), 2))
    return trainer.current_epoch


def test_ranks_stop_early_together() -> None:
    assert run_ranks(_stop_early, 2) == [3, 3]


EXCHANGES = ("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "gather_object",
             "broadcast_object_list", "all_gather_into_tensor", "reduce_scatter_tensor")  # fmt: skip


class Counting(Net):
    """Notes how often ranks had communicated at each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.num, self.at = 0, list[int]()
        for name in EXCHANGES:
            setattr(dist, name, partial(self.count, getattr(dist, name)))  # in this process, which ends with the test

    def count(self, exchange: Any, *args: Any, **kwargs: Any) -> Any:
        self.num += 1
        return exchange(*args, **kwargs)

    def on_train_batch_start(self, *_: Any) -> None:
        self.at.append(self.num)


def _count() -> list[int]:
    module = Counting()
    trainer_of("ddp", max_epochs=1).fit(module, DataLoader(Numbered(210), 2))
    return module.at


def test_ordinary_steps_communicate_gradients_only() -> None:
    for at in run_ranks(_count, 2):
        assert at[2] == at[-1] > 0, "the second step compares states"


class Ender(Net):
    """Sets `should_stop` in a hook, from a step on that each rank has of its own; or skips the rest of its epochs."""

    def __init__(self, hook: str, at_steps: dict[int, int]) -> None:
        super().__init__()
        self.at_steps = at_steps
        setattr(self, hook, self.skip if hook == "on_train_batch_start" else self.end)

    def end(self, *_: Any) -> None:
        if self.trainer.global_step >= self.at_steps.get(self.global_rank, 10**6):
            self.trainer.should_stop = True

    def skip(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx >= self.at_steps.get(self.global_rank, 10**6) else None


ENDS: list[tuple[type[Any], str, dict[int, int], int | None]] = [
    (DDPStrategy, "on_train_batch_end", {0: 7, 1: 7}, 7),  # as one device
    (DDPStrategy, "on_train_batch_end", {1: 7}, None),
    (DDPStrategy, "on_train_batch_end", {0: 9, 1: 7}, None),
    (DDPStrategy, "on_before_zero_grad", {0: 7}, None),
    (DDPStrategy, "on_train_epoch_start", {1: 0}, None),
    (DDPStrategy, "on_validation_epoch_end", {1: 0}, 500),
    (DDPStrategy, "on_train_start", {1: 0}, 0),
    (FSDPStrategy, "on_before_optimizer_step", {1: 7}, None),
]
"""The steps from which ranks are to end, and the last one, where it is known: one alone is heard some steps later."""


def _end_on_some_ranks() -> list[tuple[int, bool, Tensor]]:
    found: list[tuple[int, bool, Tensor]] = []
    for strategy, hook, at_steps, _ in ENDS:
        options: dict[str, Any] = {"val_check_interval": 500, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(strategy(timeout_s=TIMEOUT_S), 2, **options)
        module = Ender(hook, at_steps)
        trainer.fit(module, DataLoader(Numbered(2000), 1), DataLoader(Numbered(2), 1))
        found.append((trainer.global_step, trainer.should_stop, weights(module)))
    return found


def test_all_ranks_end_at_one_step_where_some_are_to_stop() -> None:
    first, second = run_ranks(_end_on_some_ranks, 2)
    assert_same(first, second, 1e-12)
    for (*case, at_steps, expected), (step, is_stopped, _) in zip(ENDS, first, strict=True):
        assert is_stopped, case
        # at the end of an epoch, which has 1000 steps, ranks agree whenever they have heard of it
        assert min(at_steps.values()) <= step <= 1000 if expected is None else step == expected, case


def _skip_rest_of_epoch(*ranks: int) -> int:
    trainer = quiet_trainer(DDPStrategy(timeout_s=60 if len(ranks) == 2 else TIMEOUT_S), 2)
    trainer.fit(Ender("on_train_batch_start", dict.fromkeys(ranks, 1)), DataLoader(Numbered(12), 2))
    return trainer.global_step


def test_the_rest_of_an_epoch_is_skipped_by_all_ranks() -> None:
    assert run_ranks(_skip_rest_of_epoch, 2, 0, 1) == [2, 2]  # one step in each of two epochs


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_alone_skips_the_rest_of_an_epoch_is_named(rank: int) -> None:
    """Its process ended, or the other's was killed, without a word on the hook."""
    outcome = run_ranks_unchecked(_skip_rest_of_epoch, 2, rank, timeout_s=HARD_TIMEOUT_S)[rank]
    place = "-1 of on_train_batch_start in batch 1"
    assert f"rank {rank} waited 4 s at '{place}': rank {1 - rank} did not arrive; it was at step" in str(outcome)


HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
         "on_validation_batch_end", "on_train_end")  # fmt: skip


def read_all(trainer: Any) -> int:
    """Read every property of the trainer, its strategy and its callbacks; return how many there were."""
    objects = [trainer, trainer.strategy, trainer.strategy.cluster_environment, *trainer.callbacks, *trainer.loggers]
    # it loads the data where that is not there yet, which is no reading: all ranks must do it together
    early = {"estimated_stepping_batches"} if trainer.train_dataloader is None else set()
    num = 0
    for owner in objects:
        for name, _ in inspect.getmembers(type(owner), lambda member: isinstance(member, property)):
            if name in early:
                continue
            try:
                getattr(owner, name)
                num += 1
            except (AttributeError, RuntimeError, AssertionError, TypeError):  # not there yet, at this point of a run
                continue
    return num


class Read(Net):
    """Rank 0 looks at everything, wherever it comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.read = {"times": 0}  # a number would be added up over ranks
        self.own: list[float] = []

    def look(self, *_: Any, **__: Any) -> None:
        if self.trainer.is_global_zero:
            self.read["times"] += read_all(self.trainer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.mean.update(batch[2])
        self.look()

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean)
        self.look()

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.global_rank), sync_dist=True)
        self.log("own", float(self.global_rank))
        self.look()
        if self.trainer.is_global_zero:
            self.own.append(self.trainer.callback_metrics["late"].item())


for name in HOOKS:
    setattr(Read, name, Read.look)


def _fit(folder: str) -> dict[str, Any]:
    module, loader = Read(), DataLoader(Numbered(), 4)
    logger = TensorBoardLogger(folder, name=None, default_hp_metric=False)
    options: dict[str, Any] = {"logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = trainer_of("ddp", num_sanity_val_steps=1, **options)
    trainer.fit(module, loader, loader)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "read": module.read["times"], "own": module.own, "log_dir": trainer.log_dir}


def test_rank_0_alone_may_read_everything_everywhere(tmp_path: Any) -> None:
    first, second = run_ranks(_fit, 2, str(tmp_path))
    assert first["read"] > 500
    assert second["read"] == 0
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["late"] == first["metrics"]["own"] == 0.5  # the mean of ranks 0 and 1
    assert first["metrics"]["mean"] == 10.0  # of 0..20
    assert first["own"] == [0.0, 0.0], "until the ranks have exchanged it, a value is the rank's own"
    assert first["log_dir"] == second["log_dir"] == str(tmp_path / "version_0")
