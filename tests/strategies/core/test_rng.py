"""Generators of a process's devices: one stream each, which the seed and the rank decide."""

import late_device
import torch
from late_device import needs_late_device

from evener.strategies import DataParallelStrategy
from evener.strategies.core import rng

pytestmark = needs_late_device
NAMES = ["late:1", "late:1", "cpu", "late:0"]  # repeated devices have one generator


def _draws() -> list[float]:
    return [torch.rand((), device=name).item() for name in ("cpu", "late:0", "late:1")]


def _seeded() -> list[list[float]]:
    """Draws of two ranks, of `seed_all`, and of one seed for all devices."""
    devices, found = [torch.device(name) for name in NAMES], list[list[float]]()
    for rank in range(2):
        torch.manual_seed(7)
        rng.seed_rank(rank, devices)
        found.append(_draws())
    rng.seed_all(1, 2, devices=devices)
    found.append(_draws())
    torch.manual_seed(7)
    return [*found, _draws()]


def test_every_device_of_every_rank_has_a_stream_of_its_own_and_the_first_has_the_seeds() -> None:
    first, other, all_seeded, plain = late_device.run(_seeded)
    assert (first[0], first[2]) == (plain[0], plain[2])  # the host, and the first device
    for draws in ([*first[1:], *other[1:]], all_seeded[1:]):
        assert len(set(draws)) == len(draws)
    assert first[0] != other[0]


def _restored() -> tuple[int, bool]:
    devices = DataParallelStrategy(["late:0", "late:1", "cpu"]).process_devices
    saved = rng.capture(devices)
    before = _draws()
    rng.restore(saved, devices)
    return len(saved["devices"]), _draws() == before


def test_the_streams_of_all_devices_of_a_process_are_saved() -> None:
    """Under dp, too: its strategy had no list of its process's devices, and lost those of the others."""
    assert late_device.run(_restored) == (2, True)
