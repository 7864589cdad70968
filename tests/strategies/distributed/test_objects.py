"""Objects travel between ranks as CPU tensors; on CUDA the process group has a backend for them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from regression import assert_same

from evener.strategies.distributed import objects

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        (None, CUDA, BOTH),
        ("nccl", CUDA, BOTH),
        ("cuda:nccl", CUDA, BOTH),
        ("gloo", CUDA, "gloo"),
        ("cpu:mpi,cuda:nccl", CUDA, "cpu:mpi,cuda:nccl"),
        (None, CPU, "gloo"),
    ],
)
def test_the_process_group_always_sends_cpu_tensors(
    backend: str | None, device: torch.device, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert objects.backend_for(backend, device) == expected
    assert objects.backend_for(expected, device) == expected  # of its own choice, too


def _exchanged() -> Any:
    dist.init_process_group("gloo")
    value = {"x": torch.full((100,), float(dist.get_rank())), "names": ["a"] * dist.get_rank()}
    found = [objects.gather_objects(value), objects.gather_objects(value, only_first=True)]
    found.append(objects.broadcast_object(value, src=1))
    dist.destroy_process_group()
    return found


def test_objects_come_by_rank() -> None:
    values = [{"x": torch.full((100,), float(rank)), "names": ["a"] * rank} for rank in (0, 1)]
    for rank, found in enumerate(run_ranks(_exchanged, 2)):
        assert_same(found, [values, [] if rank else values, values[1]], 0)
