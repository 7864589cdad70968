"""Read, set and isolate random states: Python's, NumPy's, torch's, and those of a process's devices."""

import hashlib
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import get_rng_state

from .devices import on_device

RandomState: TypeAlias = tuple[torch.Tensor, Any, Any, list[torch.Tensor]]
"""The random states of torch (cpu), numpy, python, and of accelerators."""


def random_state(devices: Sequence[torch.device] = ()) -> RandomState:
    """Read the random states of the host, and of the accelerators among devices."""
    on_devices = [generator_state(device) for device in devices if device.type != "cpu"]
    return get_rng_state(), np.random.get_state(), random.getstate(), on_devices


def set_random_state(state: RandomState, devices: Sequence[torch.device] = ()) -> None:
    """Set the state that `random_state` returned, on as many devices as it read."""
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    accelerators = [device for device in devices if device.type != "cpu"]
    for device, own in zip(accelerators, state[3], strict=False):
        torch.get_device_module(device).set_rng_state(own, device)


@contextmanager
def isolated(devices: Sequence[torch.device] = (), state: RandomState | None = None) -> Generator[RandomState]:
    """Restore the random states of the host and of devices on exit; yields these. Draw from another `state` inside."""
    own = random_state(devices)
    if state is not None:
        set_random_state(state, devices)
    try:
        yield own
    finally:
        set_random_state(own, devices)


def generator_state(device: torch.device) -> torch.Tensor:
    """Read the state of a device's generator."""
    return get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def seed_rank(rank: int, devices: Sequence[torch.device] = ()) -> None:
    """Derive the random streams of a rank and its devices from the common seed, which the first of all keeps."""
    if rank:
        seeds = np.random.SeedSequence([torch.initial_seed() % 2**63, rank]).generate_state(6)
        torch.default_generator.manual_seed(int(seeds[0]) << 32 | int(seeds[1]))
        random.seed(int(seeds[2]) << 32 | int(seeds[3]))
        np.random.seed(seeds[4:])
    _seed_each(devices, torch.initial_seed(), first=0 if rank else 1)


def capture(devices: Sequence[torch.device] = (), state: RandomState | None = None) -> dict[str, Any]:
    """Read random states, or take what `random_state` has read, as plain data."""
    host, of_numpy, of_python, on_devices = state or random_state(devices)
    (name, keys, *rest), (version, internal, gauss) = of_numpy, of_python
    return {
        "python": (version, torch.from_numpy(np.array(internal, dtype=np.int64)), gauss),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": host,
        "devices": on_devices,
    }


def restore(state: dict[str, Any], devices: Sequence[torch.device] = ()) -> None:
    """Set the random states that `capture` read, on as many devices as it read."""
    version, internal, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    of_numpy = (name, keys.numpy().astype(np.uint32), *rest)
    set_random_state((state["torch"], of_numpy, (version, tuple(internal.tolist()), gauss), state["devices"]), devices)


def seed_all(*entropy: int, devices: Sequence[torch.device] = ()) -> None:
    """Seed Python, numpy, torch and devices of this process from numbers that need not be independent."""
    seeds = np.random.SeedSequence(entropy).generate_state(4, np.uint32)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))
    seed = (int(seeds[2]) << 31) ^ int(seeds[3])
    torch.default_generator.manual_seed(seed)
    _seed_each(devices, seed, first=0)


def seed_sample(seed: int, place: int) -> None:
    """Seed Python, numpy and torch of a data worker for the sample at a place of an epoch; takes 30 µs."""
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=20).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little") >> 1)


def _seed_each(devices: Sequence[torch.device], seed: int, first: int) -> None:
    for i, device in enumerate(dict.fromkeys(devices)):
        if i >= first and device.type != "cpu":
            with on_device(device):
                torch.get_device_module(device).manual_seed((seed + i) % 2**63)
