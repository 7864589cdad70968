"""Parts of a step that meet: order, results, errors, and the state of threads."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from evener.strategies.batch.whole.meeting import Meeting, seat
from evener.strategies.core.errors import ConfigError
from evener.strategies.core.executor import Executor, Piece

CPU = torch.device("cpu")


def _meet(value: Any, where: str = "here") -> Any:
    """Bring a value, and get those of all parts."""

    def combine(brought: Mapping[int, Any]) -> Mapping[int, Any]:
        return {part: list(brought.values()) for part in brought}

    return seat().meet(where, value, combine)


def _run(*calls: Callable[[], Any]) -> list[Any]:
    pieces = [Piece(CPU, f"part {i}", call) for i, call in enumerate(calls)]
    with Meeting(pieces, [1.0] * len(pieces)) as meeting:
        return Executor(threads=False).run(meeting.pieces)


def test_parts_come_to_each_meeting_before_any_goes_on() -> None:
    order: list[str] = []

    def part(name: str) -> Any:
        order.append(f"{name}0")
        first = _meet(name)
        order.append(f"{name}1")
        second = _meet(name * 2)
        order.append(f"{name}2")
        return first, second

    assert _run(*(partial(part, name) for name in "abc")) == [(["a", "b", "c"], ["aa", "bb", "cc"])] * 3
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_without_a_meeting_parts_run_in_the_calling_thread() -> None:
    assert _run(*[threading.get_ident] * 3) == [threading.get_ident()] * 3


def test_random_numbers_are_the_same_in_every_run() -> None:
    def part() -> Any:
        return float(torch.rand(())), _meet(float(torch.rand(()))), float(torch.rand(()))

    torch.manual_seed(0)
    found = _run(part, part, part)
    torch.manual_seed(0)
    assert _run(part, part, part) == found


def test_parts_that_have_ended_are_left_out() -> None:
    assert _run(lambda: _meet(1), lambda: None, lambda: _meet(3)) == [[1, 3], None, [1, 3]]
    assert _run(lambda: None, lambda: _meet(2), lambda: _meet(3)) == [None, [2, 3], [2, 3]]


def test_parts_meet_though_an_earlier_one_meets_less_often() -> None:
    def twice(value: int) -> Any:
        return _meet(value), _meet(value)

    assert _run(lambda: _meet(1), partial(twice, 2), partial(twice, 3)) == [
        [1, 2, 3], ([1, 2, 3], [2, 3]), ([1, 2, 3], [2, 3]),
    ]  # fmt: skip


@pytest.mark.parametrize("failing", range(3))
def test_an_error_names_its_part_and_ends_the_others(failing: int) -> None:
    before = threading.active_count()

    def part(number: int) -> None:
        _meet(number)
        if number == failing:
            raise ValueError("broken")
        _meet(number)

    with pytest.raises(ValueError, match=rf"^broken \[part {failing} on cpu\]$"):
        _run(*(partial(part, number) for number in range(3)))
    assert threading.active_count() == before


def test_an_error_of_what_combines_is_raised_once() -> None:
    def broken(brought: Any) -> Any:
        raise ZeroDivisionError("no samples")

    with pytest.raises(ZeroDivisionError, match="no samples"):
        _run(*[lambda: seat().meet("here", 1, broken)] * 3)


def test_parts_at_different_places_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="part 0 is at here, and part 1 at there: all parts of a batch must call the"):
        _run(lambda: _meet(1), lambda: _meet(1, "there"))


def test_threads_have_the_state_of_the_calling_thread() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def part() -> Any:
        modes = len(torch.overrides._get_current_function_mode_stack())
        _meet(None)
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.ones(1).device.type, modes

    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), Mode():
        found = _run(part, part)
    assert found == [(False, True, "meta", 2)] * 2


def test_what_a_part_sets_for_itself_does_not_reach_the_others() -> None:
    def quiet() -> Any:
        with torch.no_grad():
            _meet(None)
            return torch.is_grad_enabled()

    def plain() -> Any:
        _meet(None)
        return torch.is_grad_enabled()

    assert _run(quiet, plain) == [False, True]


def test_parts_in_threads_that_meet_after_the_first_step_are_refused() -> None:
    pieces = [Piece(CPU, f"part {i}", lambda: _meet(1)) for i in range(2)]
    with Meeting(pieces, [1.0, 1.0]) as meeting, pytest.raises(ConfigError, match=r"set strategy.threads=false"):
        Executor(threads=True).run(meeting.pieces)
