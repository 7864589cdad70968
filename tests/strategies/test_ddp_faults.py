"""Ranks that do not go together: the error names the rank and the place, within the timeout. Nothing hangs."""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import psutil
import pytest
import torch.distributed as dist
from distributed import RankError, run_ranks, run_ranks_unchecked
from pytorch_lightning.callbacks import EarlyStopping
from regression import Net, Numbered, quiet_trainer, weights
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy, FSDPStrategy
from evener.strategies.distributed import _heartbeat as watch
from evener.strategies.distributed._stop import StopAgreement

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


def hang(module: Faulty) -> None:
    time.sleep(HANG_S)
    os._exit(9)


def fail(module: Faulty) -> None:
    raise KeyError("only rank 1")


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
    _train(hang)


FAULTS: dict[Callable[[Faulty], None], str] = {
    hang: r"rank 1 is at step 2, test_ddp_faults.py:\d+ in hang",
    fail: r"rank 1 failed with KeyError: 'only rank 1' \(test_ddp_faults.py:\d+, fail\)",
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


class Big:
    """Something that a step holds, such as its activations."""


class LocalStore(HashStore):
    """A store that can be cloned, as those that ranks share can."""

    def clone(self) -> Any:
        return self


def test_signs_of_life_keep_nothing_of_a_step_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 0.01)

    def step() -> weakref.ref[Big]:
        big = Big()
        before, ends = signs.beat.num, time.monotonic() + 60
        while (signs.beat.num < before + 2 or "in step" not in signs.beat.place) and time.monotonic() < ends:
            time.sleep(0.005)
        seen.append(signs.beat.place)
        return weakref.ref(big)

    seen: list[str] = []
    store = LocalStore()
    signs = watch.HeartbeatMonitor(store, 0, 1, StopAgreement(0, 1, store), TIMEOUT_S)
    signs.start()
    alive = [step()() is not None for _ in range(5)]
    signs.end()
    assert all("in step" in place for place in seen)
    assert alive == [False] * 5


class RankMetric(Net):
    """Logs a metric that rises on rank 1 only."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return

    def on_validation_epoch_end(self) -> None:
        self.log("val", float(self.current_epoch) if self.global_rank == 1 else -float(self.current_epoch))


def _healthy(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    trainer = quiet_trainer(
        DDPStrategy(timeout_s=120),
        2,
        max_epochs=10,
        callbacks=[EarlyStopping("val", patience=2)],
        num_sanity_val_steps=0,
    )
    trainer.fit(RankMetric(), DataLoader(Numbered(), 2), DataLoader(Numbered(), 2))
    found["stopped at"] = trainer.current_epoch

    names = ("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "gather_object")
    counts = dict.fromkeys((*names, "broadcast_object_list", "all_gather_into_tensor", "reduce_scatter_tensor"), 0)
    originals = {name: getattr(dist, name) for name in counts}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    class Counting(Net):
        at: ClassVar[list[dict[str, int]]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Counting.at.append(dict(counts))
            return super().training_step(batch, batch_idx)

    for name in counts:
        setattr(dist, name, counted(name))
    trainer = quiet_trainer(DDPStrategy(timeout_s=120), 2, max_epochs=1)
    trainer.fit(Counting(), DataLoader(Numbered(210), 1))
    for name, function in originals.items():
        setattr(dist, name, function)
    looks = len(Counting.at) - 105  # at a few samples, on rank 0
    found["counted"] = (Counting.at[looks + 2], Counting.at[-1], looks)  # the second step compares states

    return found


def test_ranks_stop_early_together_and_ordinary_steps_communicate_gradients_only(tmp_path: Any) -> None:
    first, second = run_ranks(_healthy, 2, str(tmp_path), timeout_s=300)
    assert first["stopped at"] == second["stopped at"] == 3
    for rank in (first, second):
        before, after, num_looks = rank["counted"]
        assert num_looks == 0 or 5 <= num_looks <= 10
        assert before == after, "a collective was added to ordinary steps"


class Ender(Net):
    """Sets `should_stop` in a hook, on some ranks only."""

    def __init__(self, hook: str, ranks: tuple[int, ...], at_step: int) -> None:
        super().__init__()
        self.ranks, self.at_step = ranks, at_step
        setattr(self, hook, self.end)

    def end(self, *_: Any) -> None:
        if self.global_rank in self.ranks and self.trainer.global_step >= self.at_step:
            self.trainer.should_stop = True


ENDS: dict[tuple[type[Any], str, tuple[int, ...], int], int | None] = {
    (DDPStrategy, "on_train_batch_end", (0, 1), 7): 7,  # as one device
    (DDPStrategy, "on_train_batch_end", (1,), 7): None,
    (DDPStrategy, "on_before_zero_grad", (0,), 7): None,
    (DDPStrategy, "on_train_epoch_start", (1,), 0): None,
    (DDPStrategy, "on_validation_epoch_end", (1,), 0): 500,
    (DDPStrategy, "on_train_epoch_end", (1,), 0): 1000,
    (DDPStrategy, "on_train_start", (1,), 0): 0,
    (FSDPStrategy, "on_before_optimizer_step", (1,), 7): None,
}
"""The last step, where it is known: a rank alone is heard by the others some steps later."""


def _end_on_some_ranks() -> list[tuple[int, bool, list[float]]]:
    found: list[tuple[int, bool, list[float]]] = []
    for strategy, hook, ranks, at_step in ENDS:
        options: dict[str, Any] = {"val_check_interval": 500, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(strategy(timeout_s=TIMEOUT_S), 2, **options)
        module = Ender(hook, ranks, at_step)
        trainer.fit(module, DataLoader(Numbered(2000), 1), DataLoader(Numbered(2), 1))
        found.append((trainer.global_step, trainer.should_stop, weights(module).tolist()))
    return found


def test_all_ranks_end_at_one_step_where_some_are_to_stop() -> None:
    first, second = run_ranks(_end_on_some_ranks, 2)
    for case, expected, (step, is_stopped, trained), other in zip(ENDS, ENDS.values(), first, second, strict=True):
        assert (step, is_stopped) == other[:2], case
        assert is_stopped, case
        assert trained == pytest.approx(other[2], rel=1e-12), case
        assert case[3] <= step < 1000 if expected is None else step == expected, case


class Skipper(Net):
    """Skips the rest of each epoch from the second batch on, on some ranks only."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 and self.global_rank in self.ranks else None


def _skip_rest_of_epoch(ranks: tuple[int, ...]) -> int:
    trainer = quiet_trainer(DDPStrategy(timeout_s=60), 2)
    trainer.fit(Skipper(ranks), DataLoader(Numbered(12), 2))
    return trainer.global_step


def test_the_rest_of_an_epoch_is_skipped_by_all_ranks() -> None:
    assert run_ranks(_skip_rest_of_epoch, 2, (0, 1)) == [2, 2]  # one step in each of two epochs


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_alone_skips_the_rest_of_an_epoch_is_named(rank: int) -> None:
    """Its process ended, or the other's was killed, without a word on the hook."""
    outcome = run_ranks_unchecked(_skip_rest_of_epoch, 2, (rank,), timeout_s=HARD_TIMEOUT_S)[rank]
    message = f"rank {rank} returned -1 from on_train_batch_start in batch 1 of epoch 0, but not on rank {1 - rank}"
    assert message in str(outcome)
