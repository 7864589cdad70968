"""Differences between devices, shown without an accelerator: by fakes that record what they are asked."""

from typing import Any, cast

import pytest
import torch

from evener.strategies import DDPStrategy
from evener.strategies.core.device_names import resolve_devices
from evener.strategies.core.devices import is_out_of_memory, to_device
from evener.strategies.distributed.group import only_accelerator


class Moved:
    """Records how it is moved."""

    def to(self, device: torch.device, non_blocking: bool) -> tuple[str, bool]:
        return device.type, non_blocking


@pytest.mark.parametrize(("device", "non_blocking"), [("cuda:0", True), ("mps:0", False), ("cpu", False)])
def test_only_copies_to_cuda_are_asynchronous(device: str, non_blocking: bool) -> None:
    moved = to_device(cast(Any, Moved()), torch.device(device))
    assert cast(Any, moved) == (device.partition(":")[0], non_blocking)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("CUBLAS_STATUS_ALLOC_FAILED"), False),
    ],
)
def test_exhausted_memory_is_recognized_whoever_reports_it(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_name_without_an_index_means_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_devices(["cuda", "cpu", "mps"]) == [
        torch.device("cuda:0"), torch.device("cpu"), torch.device("mps:0"),
    ]  # fmt: skip


@pytest.mark.parametrize(("per_process", "bound"), [(1, torch.device("cuda:0")), (2, None)])
def test_the_process_group_is_bound_to_a_device_only_if_the_process_owns_one(
    per_process: int, bound: torch.device | None
) -> None:
    strategy = DDPStrategy(devices_per_process=per_process)
    strategy.parallel_devices = [torch.device("cuda", i) for i in range(2)]
    strategy.cluster_environment = cast(Any, type("Alone", (), {"local_rank": lambda self: 0})())
    assert only_accelerator(strategy.process_devices) == bound
