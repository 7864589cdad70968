"""Finished steps keep no memory: shown by weak references."""

import gc
import weakref
from typing import Any

import pytest
import torch
from recording import SmallModule, loader

from evener.trainer import Trainer

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    "logger": False, "num_sanity_val_steps": 0,
}  # fmt: skip


class Watched(SmallModule):
    """Notes, at each step, what is alive of the step before."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.alive = part, []
        self.last: weakref.ref[Any] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.last is not None:
            self.alive.append(self.last() is not None)
        output = super().training_step(batch, batch_idx)
        prediction = self.layer(batch[0])
        output["loss"] = output["loss"] + 0 * prediction.sum()
        output["prediction"] = prediction
        self.last = weakref.ref({"prediction": prediction, "loss": output["loss"], "batch": batch[0]}[self.part])
        return output


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
@pytest.mark.parametrize("part", ["prediction", "loss", "batch"])
def test_a_step_is_dead_by_the_next(part: str, options: dict[str, Any]) -> None:
    module = Watched(part)
    # reference counts alone must do it: a collection would hide what a cycle keeps
    gc.disable()
    try:
        Trainer(**QUIET, **options, max_epochs=2).fit(module, loader(), loader(4))
    finally:
        gc.enable()
    assert module.alive == [False] * 11  # 2 epochs of 6 steps


def test_the_module_is_collectable_after_fit() -> None:
    module = SmallModule()
    trainer = Trainer(**QUIET, max_epochs=1)
    trainer.fit(module, loader(), loader(4))
    seen = weakref.ref(module)
    del module, trainer
    gc.collect()
    assert seen() is None


def test_five_fits_add_no_tensors() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    counts = []
    for _ in range(5):
        Trainer(**QUIET, max_epochs=1).fit(SmallModule(), loader(), loader(4))
        counts.append(tensors())
    assert counts[1:] == counts[1:2] * 4


def test_a_trainer_fits_again_and_again() -> None:
    module, trainer = SmallModule(), Trainer(**QUIET, max_epochs=1)
    for epochs in (1, 2, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, loader(), loader(4))
    assert trainer.global_step == 18
