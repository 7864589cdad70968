"""A state that is copied while training goes on is the state of its moment."""

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from evener.trainer.checkpoint import _host_memory
from evener.trainer.checkpoint._host_memory import HostMemory


def state(number: float, more: bool = False) -> dict[str, Any]:
    wide = torch.arange(4096.0).reshape(64, 64) + number
    return {
        **({"first": torch.full((700,), number)} if more else {}),
        "wide": wide,
        "again": wide,
        "columns": (wide.to(torch.bfloat16).t(), 3),
        "images": wide.reshape(4, 4, 16, 16).to(memory_format=torch.channels_last),
        "few": [torch.tensor(number), torch.zeros(0), torch.ones(3, dtype=torch.bool), wide[::3, 0][:1]],
        "part": wide[:, ::2],
        "step": int(number),
    }


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for each in inner for tensor in tensors(each)]


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads copy, each 100 bytes at a time, which divide no tensor evenly."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(_host_memory, "_PIECE", 100)


@pytest.mark.usefixtures("four_threads")
def test_a_copy_stays_when_training_goes_on_at_once(tmp_path: Any) -> None:
    memory = HostMemory()
    for number in range(20):
        own, expected = state(number, number % 7 == 5), state(number, number % 7 == 5)
        copied = memory.take(own)
        for tensor in tensors(own):
            tensor.zero_()  # a step that would race with a copy that goes on
        assert list(copied) == list(expected)
        assert copied["again"] is copied["wide"]
        for found, theirs in zip(tensors(copied), tensors(expected), strict=True):
            assert found.dtype == theirs.dtype
            assert torch.equal(found, theirs)
        assert copied["images"].stride() == expected["images"].stride()
        torch.save(copied, path := tmp_path / "copy")
        assert path.stat().st_size < 60_000, "each tensor is saved alone, not the memory around it"


@pytest.mark.usefixtures("four_threads")
def test_an_error_of_one_of_the_threads_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, others = np.copyto, threading.Event()

    def copyto(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            others.set()
            raise MemoryError("none left")
        assert others.wait(60)
        copy(*args)

    monkeypatch.setattr(np, "copyto", copyto)
    with pytest.raises(MemoryError, match="none left"):
        HostMemory().take(state(1))
