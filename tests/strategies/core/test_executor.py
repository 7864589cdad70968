"""Pieces in threads: each ends with its step, and those that share a device's generator share a thread."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from evener.strategies.core import executor as executor_module
from evener.strategies.core.executor import Executor, Piece

CPU = torch.device("cpu")


def pieces(*calls: Callable[[], Any]) -> list[Piece]:
    return [Piece(CPU, f"chunk {i + 1} of {len(calls)}", call) for i, call in enumerate(calls)]


def test_no_thread_runs_on_after_an_error_and_twelve_may_wait_for_each_other() -> None:
    done, release, together = threading.Event(), threading.Event(), threading.Barrier(12)

    def slow() -> None:
        release.wait(60)
        done.set()

    def fail() -> None:
        release.set()
        raise ValueError("first")

    executor = Executor(threads=True)
    with pytest.raises(ValueError, match="first"):
        executor.run(pieces(fail, slow))
    assert done.is_set()
    assert len(executor.run(pieces(*[lambda: together.wait(100)] * 12))) == 12
    executor.shutdown()


def test_repeated_accelerators_share_a_thread_and_others_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a generator, which threads would read in an order of their own."""
    monkeypatch.setattr(executor_module, "is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr(executor_module, "current_stream", lambda device: None)
    monkeypatch.setattr(executor_module, "on_device", lambda *_: nullcontext())
    seen: list[tuple[int, str]] = []
    both_devices = threading.Barrier(2)

    def note(i: int) -> None:
        if i != 1:
            both_devices.wait(60)
        seen.append((i, threading.current_thread().name))

    devices = [torch.device("meta", 0), torch.device("meta", 0), torch.device("meta", 1)]
    executor = Executor()
    executor.run([Piece(device, str(i), partial(note, i)) for i, device in enumerate(devices)])
    threads = dict(seen)
    assert [i for i, _ in seen if i < 2] == [0, 1]
    assert threads[0] == threads[1] != threads[2]
    executor.shutdown()


def autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


@pytest.mark.parametrize("threads", [False, True])
def test_autocast_of_another_type_than_the_first_piece_s_is_carried(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root, where autocast is on, has no samples, and the first piece is elsewhere."""
    monkeypatch.setattr(executor_module, "autocast_types", lambda: ["cuda", "cpu"])
    torch.set_autocast_enabled("cuda", True)  # `torch.autocast` does nothing without a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert Executor(threads).run(pieces(autocast, autocast)) == [(True, torch.bfloat16)] * 2
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert Executor(threads).run(pieces(autocast))[0][0] is False
