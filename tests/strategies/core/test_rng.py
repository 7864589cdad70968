"""Generators of a process's devices: one stream each, which the seed decides."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from evener.strategies import DataParallelStrategy
from evener.strategies.core import rng


class FakeModule:
    """Stands for `torch.cuda`."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        self.current = ""

    @contextmanager
    def device(self, device: torch.device) -> Generator[None]:
        self.current = str(device)
        yield

    def manual_seed(self, seed: int) -> None:
        self.seeds[self.current] = seed


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    fake = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(rng, "on_device", fake.device)
    return fake


def devices(*names: str) -> list[torch.device]:
    return [torch.device(name) for name in names]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("cuda:0", "cuda:1", "cuda:2"), {"cuda:1": 8, "cuda:2": 9}),
        (("cuda:1", "cuda:1", "cuda:0"), {"cuda:0": 8}),  # repeated devices have one generator
        (("cpu", "cuda:0"), {"cuda:0": 8}),
        (("cpu", "cpu"), {}),
    ],
)
def test_devices_other_than_the_first_have_streams_of_their_own(
    names: Any, expected: dict[str, int], cuda: FakeModule
) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    rng.seed_rank(0, devices(*names))
    assert cuda.seeds == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_ranks_devices_have_streams_that_no_other_rank_has(cuda: FakeModule) -> None:
    with rng.isolated():
        torch.manual_seed(7)
        rng.seed_rank(1, devices("cuda:0", "cuda:1"))
        own = torch.initial_seed()
        assert own != 7
        assert cuda.seeds == {"cuda:0": own % 2**63, "cuda:1": (own + 1) % 2**63}


def test_seeding_all_gives_every_device_another_stream(cuda: FakeModule) -> None:
    with rng.isolated():
        rng.seed_all(1, 2, devices=devices("cuda:0", "cuda:1"))
    assert cuda.seeds["cuda:1"] == cuda.seeds["cuda:0"] + 1


def test_the_streams_of_all_devices_of_a_process_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under dp, too: its strategy had no list of its process's devices, and lost those of the others."""
    asked: list[torch.device] = []

    class Generators:
        def get_rng_state(self, device: torch.device) -> torch.Tensor:
            asked.append(device)
            return torch.zeros(1)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Generators())
    strategy = DataParallelStrategy(["cuda:0", "cuda:1", "cpu"])
    saved = rng.capture(strategy.process_devices)
    assert asked == devices("cuda:0", "cuda:1")
    assert len(saved["devices"]) == 2
