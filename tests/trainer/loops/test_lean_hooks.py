"""The lean loops call what Lightning's loops call: same hooks, same arguments, same order, same counters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import SimpleProfiler
from recording import RecordingCallback, RecordingModule, SmallModule, StatefulLoader, Tape, loader

from evener.trainer import Trainer
from evener.trainer.loops._hook_plan import HookPlan

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip

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
    given = {**QUIET, "max_epochs": 2, "enable_checkpointing": False, "callbacks": callbacks, **options}
    action(trainer_cls(**given), module)
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


def test_a_small_module_runs_without_any_override() -> None:
    module = SmallModule()
    trainer = Trainer(**QUIET, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, loader(), loader(10))
    assert trainer.global_step == 6  # 22 samples in batches of 4


class Attaches(pl.Callback):
    """Attaches a hook, to an instance or to a class, in the same moment as it removes another attribute there."""

    def __init__(self, where: str, calls: list[str]) -> None:
        self.where, self.calls = where, calls
        self.other = pl.Callback()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        owner = {"callback": self.other, "module": module, "class": type(module)}[self.where]
        owner.on_train_batch_end = lambda *_: self.calls.append("hook")
        del owner.passing


@pytest.mark.parametrize("where", ["callback", "module", "class"])
def test_a_hook_attached_as_another_attribute_goes_is_called(where: str) -> None:
    # Attributes were counted, and one came as one went: the hook was never called.
    class Module(SmallModule):
        pass

    counts: list[int] = []
    for cls in (Trainer, pl.Trainer):
        calls: list[str] = []
        attaching, module = Attaches(where, calls), Module()
        {"callback": attaching.other, "module": module, "class": Module}[where].passing = 1  # type: ignore[union-attr]
        trainer = cls(**QUIET, max_epochs=1, enable_checkpointing=False, callbacks=[attaching, attaching.other])
        trainer.fit(module, loader(), loader(10))
        counts.append(len(calls))
        if where == "class":
            del Module.on_train_batch_end
    assert counts == [4, 4]  # batches 2 to 5


class PatchesTransfer(SmallModule):
    """Has its batches changed from the third on, and keeps the sums of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sums.append(batch[0].sum().item())
        if batch_idx == 1:
            self.on_after_batch_transfer = lambda batch, dataloader_idx: (batch[0] * 0, *batch[1:])  # type: ignore[method-assign]
        return super().training_step(batch, batch_idx)


def test_a_transfer_hook_patched_in_a_step_changes_the_next_batch() -> None:
    # The step resolved its own choices again, and the loop, which moves batches, saw no change any more.
    for cls in (Trainer, pl.Trainer):
        module = PatchesTransfer()
        cls(**QUIET, max_epochs=1, enable_checkpointing=False).fit(module, loader(), loader(10))
        assert [value == 0 for value in module.sums] == [False, False, True, True, True, True]


class PatchesEnd(SmallModule):
    """Gets a hook for the end of batches in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[int] = []

    def patch(self, hook: str, batch_idx: int) -> None:
        if batch_idx == 1:
            setattr(self, hook, lambda output, batch, batch_idx: self.ended.append(batch_idx))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.patch("on_validation_batch_end", batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.patch("on_test_batch_end", batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.patch("on_predict_batch_end", batch_idx)
        return batch[0]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_a_hook_patched_in_a_step_of_evaluation_is_called_at_its_end(method: str) -> None:
    # Hooks were looked at before a step only, so that the first call was missed.
    for cls in (Trainer, pl.Trainer):
        module = PatchesEnd()
        getattr(cls(**QUIET, enable_checkpointing=False), method)(module, loader())
        assert module.ended == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("when", ["on_before_zero_grad", "backward", "on_after_backward", "optimizer_step"])
def test_a_hook_patched_late_in_a_step_is_called_at_its_end(when: str) -> None:
    for cls in (Trainer, pl.Trainer):
        ended: list[int] = []
        module = SmallModule()
        own = getattr(module, when)

        def patch(*args: Any, **kwargs: Any) -> Any:
            if module.trainer.global_step == 1:  # noqa: B023  # called within this turn
                module.on_train_batch_end = lambda outputs, batch, batch_idx: ended.append(batch_idx)  # type: ignore[method-assign]  # noqa: B023
            return own(*args, **kwargs)  # noqa: B023

        setattr(module, when, patch)
        options = {**QUIET, "callbacks": [pl.callbacks.LambdaCallback(on_train_batch_start=lambda *_: None)]}
        cls(**options, max_epochs=1, enable_checkpointing=False).fit(module, loader(), loader(10))
        assert ended == [1, 2, 3, 4, 5]


PLANNED = ("on_train_batch_start", "on_train_batch_end")


def plan_of_a_run() -> HookPlan:
    """A plan for a module of its own class, with a callback of its own class, as it is after a run."""

    class Module(SmallModule):
        pass

    class Callback(pl.Callback):
        pass

    trainer = Trainer(**QUIET, max_epochs=1, enable_checkpointing=False, callbacks=[Callback()])
    trainer.fit(Module(), loader(), loader(10))
    return HookPlan(trainer, PLANNED)


OWNERS = {
    "module": lambda plan: (plan.module, "on_train_batch_end"),
    "a method that the loop calls": lambda plan: (plan.module, "optimizer_step"),
    "strategy": lambda plan: (plan.strategy, "backward"),
    "precision plugin": lambda plan: (plan.precision, "clip_gradients"),
    "callback": lambda plan: (plan.callbacks[0], "on_train_batch_end"),
    "class of the module": lambda plan: (type(plan.module), "on_train_batch_end"),
    "class of a callback": lambda plan: (type(plan.callbacks[0]), "on_train_batch_end"),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_plan_is_stale_as_soon_as_a_hook_comes_even_if_another_attribute_goes(owner: str) -> None:
    plan = plan_of_a_run()
    obj, name = OWNERS[owner](plan)
    obj.passing = 1
    plan.resolve()
    assert not plan.stale()
    setattr(obj, name, lambda *_, **__: None)
    del obj.passing
    assert plan.stale()
    plan.resolve()
    assert not plan.stale()


@pytest.mark.parametrize("owner", OWNERS)
def test_a_plan_is_stale_as_soon_as_an_attribute_comes_or_goes(owner: str) -> None:
    plan = plan_of_a_run()
    obj, _ = OWNERS[owner](plan)
    obj.passing = 1
    assert plan.stale()
    plan.resolve()
    assert not plan.stale()
    obj.passing = 2  # no hook
    assert not plan.stale()
    del obj.passing
    assert plan.stale()


@pytest.mark.parametrize("owner", ["class of the module", "class of a callback"])
def test_a_plan_is_stale_as_soon_as_a_hook_of_a_class_is_replaced(owner: str) -> None:
    plan = plan_of_a_run()
    cls, name = OWNERS[owner](plan)
    setattr(cls, name, lambda *_: None)
    plan.resolve()
    setattr(cls, name, lambda *_: None)
    assert plan.stale()


def test_a_plan_is_stale_as_soon_as_callbacks_profiler_or_model_change() -> None:
    plan = plan_of_a_run()
    plan.trainer.callbacks.append(pl.Callback())
    assert plan.stale()
    plan.resolve()
    plan.trainer.callbacks.pop(0)
    assert plan.stale()
    plan.resolve()
    plan.trainer.profiler = SimpleProfiler()
    assert plan.stale()
    plan.resolve()
    plan.strategy.model = SmallModule()
    assert plan.stale()
    plan.resolve()
    assert not plan.stale()
