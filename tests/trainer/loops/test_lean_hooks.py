"""The lean loops call what Lightning's loops call: same hooks, same arguments, same order, same counters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from recording import RecordingCallback, RecordingModule, SmallModule, StatefulLoader, Tape, loader
from tiny import quiet

from evener.trainer import Trainer

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "none"),
    "accumulation": ({"accumulate_grad_batches": 4}, "none"),
    "clipping by norm": ({"gradient_clip_val": 0.1}, "none"),
    "clipping by value": ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, "none"),
    "scheduler by step": ({"accumulate_grad_batches": 2}, "step"),
    "scheduler by epoch": ({}, "epoch"),
    "scheduler on plateau": ({}, "plateau"),
    "validation inside the epoch": ({"val_check_interval": 2}, "none"),
    "validation across epochs": ({"val_check_interval": 4, "check_val_every_n_epoch": None}, "none"),
    "validation every second epoch": ({"check_val_every_n_epoch": 2}, "none"),
    "limits": ({"limit_train_batches": 3, "limit_val_batches": 1}, "none"),
    "no validation": ({"limit_val_batches": 0}, "none"),
    "max steps": ({"max_epochs": -1, "max_steps": 8}, "step"),
    "fast_dev_run": ({"fast_dev_run": 2}, "none"),
    "overfit_batches": ({"overfit_batches": 2}, "none"),
    "bfloat16": ({"precision": "bf16-mixed"}, "none"),
    "float64": ({"precision": "64-true"}, "none"),
}


def run(trainer_cls: type[pl.Trainer], action: Callable[[Any, Any], None], scheduler: str, **options: Any) -> Tape:
    torch.manual_seed(0)
    tape = Tape()
    module = RecordingModule(tape, scheduler)
    callbacks = [RecordingCallback(tape, number) for number in range(2)]
    action(quiet(trainer_cls, **{"max_epochs": 2, "callbacks": callbacks, **options}), module)
    return tape


def assert_same(ours: Tape, lightnings: Tape) -> None:
    assert len(lightnings.calls) > 50
    assert ours.names() == lightnings.names()
    for mine, theirs in zip(ours.calls, lightnings.calls, strict=True):
        assert mine == theirs


@pytest.mark.parametrize("case", CASES)
def test_fit_calls_the_same_hooks(case: str) -> None:
    options, scheduler = CASES[case]

    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, loader(), loader(10))

    tapes = [run(cls, fit, scheduler, **options) for cls in (Trainer, pl.Trainer)]
    assert_same(*tapes)


def test_evaluation_calls_the_same_hooks() -> None:
    def evaluate(trainer: Any, module: Any) -> None:
        trainer.validate(module, loader(), verbose=False)
        trainer.test(module, loader(), verbose=False)
        trainer.predict(module, loader())

    assert_same(run(Trainer, evaluate, "none"), run(pl.Trainer, evaluate, "none"))


class SaveAt(pl.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("step", [3, 6, 8])
def test_resuming_calls_the_same_hooks(step: int, tmp_path: Path) -> None:
    """The checkpoint is written within the first epoch, at its end, and within the second."""
    tapes: list[Tape] = []
    for cls in (Trainer, pl.Trainer):
        path = tmp_path / f"{cls.__module__}.ckpt"

        def fit(trainer: Any, module: Any) -> None:
            trainer.callbacks.insert(0, SaveAt(step, path))  # noqa: B023 # called in this turn of the loop
            trainer.fit(module, StatefulLoader(), loader(10))

        def resume(trainer: Any, module: Any) -> None:
            trainer.fit(module, StatefulLoader(), loader(10), ckpt_path=path)  # noqa: B023

        first, second = run(cls, fit, "step"), run(cls, resume, "step", max_epochs=3)
        first.calls += second.calls
        tapes.append(first)
    assert_same(*tapes)


class PatchesEnd(SmallModule):
    """Gets a hook in the third batch of the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.on_train_batch_end = lambda *args: self.ended.append((self.current_epoch, args[-1]))  # type: ignore[method-assign]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("every", "first"), [(1, 10), (12, 12), (50, 14)])
def test_a_hook_set_within_an_epoch_counts_from_the_next_log_point(every: int, first: int) -> None:
    module = PatchesEnd()
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 14, "log_every_n_steps": every}
    quiet(**options, limit_val_batches=0).fit(module, loader(80), loader(4))
    assert module.ended == [*((0, i) for i in range(first, 14)), *((1, i) for i in range(14))]


class Adds(SmallModule):
    """Adds a callback in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.ended: list[int] = []
            note = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *args: self.ended.append(args[-1]))
            self.trainer.callbacks.append(note)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_a_callback_added_in_a_step_gets_the_end_of_its_batch(kind: type[pl.Trainer]) -> None:
    module = Adds()
    quiet(kind).fit(module, loader(), loader(10))
    assert module.ended == [3, 4, 5]
