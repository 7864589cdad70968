"""Pieces have the calling thread's autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evener.strategies.core import executor as executor_module
from evener.strategies.core.executor import Executor, Piece

CPU = torch.device("cpu")


def pieces(*calls: Callable[[], Any]) -> list[Piece]:
    return [Piece(CPU, f"chunk {i + 1} of {len(calls)}", call) for i, call in enumerate(calls)]


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
