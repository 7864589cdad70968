"""What differs between devices, shown without an accelerator."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from evener.strategies import DDPStrategy
from evener.strategies.core.devices import is_out_of_memory
from evener.strategies.distributed import objects
from evener.strategies.distributed.group import bound_device


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("CUBLAS_STATUS_ALLOC_FAILED"), False),
    ],
)
def test_exhausted_memory_is_recognized_whoever_reports_it(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


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
