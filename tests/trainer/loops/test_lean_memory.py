"""Finished steps keep no memory: shown by weak references."""

import gc
import os
import sys
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
from distributed import run_ranks
from recording import SmallModule, loader
from tiny import quiet


class Watched(SmallModule):
    """Notes, at each step, whether anything of the steps before is alive, on any replica."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.alive: list[bool] = []
        self.seen: list[tuple[int, weakref.ref[Any]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.alive.append(any(ref() is not None for step, ref in self.seen if step != batch_idx))
        output = super().training_step(batch, batch_idx)
        prediction = self.layer(batch[0])
        output["loss"] = output["loss"] + 0 * prediction.sum()
        output["prediction"] = prediction
        parts = {"prediction": prediction, "loss": output["loss"], "batch": batch[0]}
        self.seen.append((batch_idx, weakref.ref(parts[self.part])))
        return output


def watched(part: str, num_steps: int, **options: Any) -> list[bool]:
    """Train for two epochs; return what was alive of earlier steps at each."""
    module = Watched(part)
    # reference counts alone must do it: a collection would hide what a cycle keeps
    gc.disable()
    try:
        quiet(max_epochs=2, num_sanity_val_steps=0, **options).fit(module, loader(), loader(4))
    finally:
        gc.enable()
    assert len(module.seen) == num_steps * (2 if options.get("strategy") == "dp" else 1)
    return module.alive


REPLICAS: dict[str, Any] = {"strategy": "dp", "devices": ["cpu", "cpu"]}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, REPLICAS])
@pytest.mark.parametrize("part", ["prediction", "loss", "batch"])
def test_a_step_is_dead_by_the_next(part: str, options: dict[str, Any]) -> None:
    # two epochs of six steps, in each of which every replica notes its own
    assert watched(part, 12, **options) == [False] * 12 * (2 if options is REPLICAS else 1)


def tensors() -> int:
    """Number of tensors alive in this process."""
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def threads() -> int:
    """Number of threads of this process, when those that are ending have ended."""
    if sys.platform != "linux":
        return 1
    counts = [0] * 10
    for _ in range(500):
        counts = [*counts[1:], len(os.listdir("/proc/self/task"))]
        if len(set(counts)) == 1:
            break
        time.sleep(0.02)
    return counts[-1]


def left_behind(**options: Any) -> dict[str, Any]:
    """Fit five times; return whether the module lives on, and what was alive after each of the fits."""
    found: dict[str, Any] = {"modules": [], "tensors": [], "threads": []}
    for _ in range(5):
        module = SmallModule()
        trainer = quiet(num_sanity_val_steps=0, **options)
        trainer.fit(module, loader(), loader(4))
        seen = weakref.ref(module)
        del module, trainer
        found["tensors"].append(tensors())
        found["modules"].append(seen() is not None)
        found["threads"].append(threads())
    return found


def assert_nothing_is_kept(found: dict[str, Any]) -> None:
    assert found["modules"] == [False] * 5
    assert found["tensors"][1:] == found["tensors"][1:2] * 4, "the first fit may fill caches"
    assert found["threads"][1:] == found["threads"][1:2] * 4


@pytest.mark.parametrize("options", [{}, REPLICAS], ids=["one device", "replicas"])
def test_five_fits_leave_nothing_behind(options: dict[str, Any]) -> None:
    assert_nothing_is_kept(left_behind(**options))


def _in_a_rank() -> tuple[list[list[bool]], dict[str, Any]]:
    warnings.simplefilter("ignore")  # Lightning's advice on workers
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    alive = [watched(part, 6, **options) for part in ("prediction", "loss", "batch")]
    return alive, left_behind(**options)


def test_ranks_keep_neither_steps_nor_fits() -> None:
    for alive, found in run_ranks(_in_a_rank, 2):
        assert alive == [[False] * 6] * 3  # 2 epochs of 3 steps
        assert_nothing_is_kept(found)
