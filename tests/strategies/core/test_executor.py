"""Pieces run in order or in threads, with the caller's modes, and errors name their piece."""

import threading
import time
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


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        threading.current_thread() is threading.main_thread(),
    )


def test_cpu_pieces_run_in_order_in_the_callers_thread() -> None:
    seen: list[int] = []
    Executor().run(pieces(*(lambda i=i: seen.append(i) for i in range(3))))
    assert seen == [0, 1, 2]
    assert Executor().run(pieces(modes, modes))[1][-1]


def test_threads_carry_the_callers_modes() -> None:
    executor = Executor(threads=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert executor.run(pieces(modes, modes)) == [(False, False, True, torch.bfloat16, False)] * 2
    with torch.inference_mode():
        assert executor.run(pieces(modes, modes))[0][:3] == (False, True, False)
    assert executor.run(pieces(modes, modes))[1][:3] == (True, False, False)
    executor.shutdown()


def failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_an_error_without_a_plain_message_keeps_its_cause() -> None:
    with pytest.raises(RuntimeError, match=r"OSError: \[Errno 5\] disk \[chunk 1 of 1 on cpu\]") as caught:
        Executor().run(pieces(failing(OSError(5, "disk"))))
    assert isinstance(caught.value.__cause__, OSError)


def test_no_thread_runs_on_after_an_error() -> None:
    done = threading.Event()
    release = threading.Event()

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
    executor.shutdown()


def test_repeated_accelerators_share_a_thread_and_others_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a generator, which threads would read in an order of their own."""
    monkeypatch.setattr(executor_module, "is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr(executor_module, "current_stream", lambda device: None)
    monkeypatch.setattr(executor_module, "on_device", lambda *_: nullcontext())
    seen: list[tuple[int, str]] = []

    def note(i: int) -> None:
        time.sleep(0.05 if i == 0 else 0)  # a thread of its own would let the next go first
        seen.append((i, threading.current_thread().name))

    devices = [torch.device("meta", 0), torch.device("meta", 0), torch.device("meta", 1)]
    own = [Piece(device, str(i), partial(note, i)) for i, device in enumerate(devices)]
    executor = Executor()
    executor.run(own)
    threads = dict(seen)
    assert [i for i, _ in seen if i < 2] == [0, 1]
    assert threads[0] == threads[1] != threads[2]
    executor.shutdown()


def test_pieces_that_wait_for_each_other_have_a_thread_each() -> None:
    together = threading.Barrier(12)
    executor = Executor(threads=True)
    assert len(executor.run(pieces(*[lambda: together.wait(100)] * 12))) == 12
    executor.shutdown()


@pytest.mark.parametrize("threads", [False, True])
def test_autocast_of_another_type_than_the_first_piece_s_is_carried(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root, where autocast is on, has no samples, and the first piece is elsewhere."""
    monkeypatch.setattr(executor_module, "autocast_types", lambda: ["cuda", "cpu"])
    torch.set_autocast_enabled("cuda", True)  # `torch.autocast` does nothing without a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        found = Executor(threads).run(pieces(modes, modes))
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert [mode[2:4] for mode in found] == [(True, torch.bfloat16)] * 2


def test_autocast_of_one_type_goes_for_others_that_are_asked_for() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        state = executor_module.ThreadState()
    assert not torch.is_autocast_enabled("cpu")
    with state.autocast_on({"cpu"}):
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.bfloat16)
    with executor_module.ThreadState().autocast_on({"cpu"}):
        assert not torch.is_autocast_enabled("cpu")
