"""What differs between devices, shown without an accelerator."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from evener.strategies import DDPStrategy
from evener.strategies.core import executor as executor_module
from evener.strategies.core.devices import is_out_of_memory
from evener.strategies.core.executor import Executor, Piece
from evener.strategies.distributed import objects
from evener.strategies.distributed.group import bound_device


def test_exhausted_memory_is_recognized_whoever_reports_it() -> None:
    told = (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "MPS backend out of memory",
        "DefaultCPUAllocator: can't",
    )
    assert all(map(is_out_of_memory, (torch.OutOfMemoryError("out of memory"), *map(RuntimeError, told))))
    assert not any(map(is_out_of_memory, (RuntimeError("size mismatch"), ValueError("CUBLAS_STATUS_ALLOC_FAILED"))))


@pytest.mark.parametrize(
    ("per_process", "backend", "bound"),
    [(1, "cpu:gloo,cuda:nccl", torch.device("cuda:0")), (2, "cpu:gloo,cuda:nccl", None), (1, "gloo", None)],
)
def test_the_process_group_is_bound_to_a_device_only_if_the_process_owns_one_and_it_has_a_backend(
    per_process: int, backend: str, bound: torch.device | None
) -> None:
    strategy = DDPStrategy(devices_per_process=per_process)
    strategy.parallel_devices = [torch.device("cuda", i) for i in range(2)]
    strategy.cluster_environment = cast(Any, type("Alone", (), {"local_rank": lambda self: 0})())
    assert bound_device(strategy.process_devices, backend) == bound


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
