"""Differences between devices, shown without an accelerator: by fakes that record what they are asked."""

from typing import Any, cast

import pytest
import torch

from evener.strategies import DDPStrategy
from evener.strategies.core import devices
from evener.strategies.core.devices import (
    broadcast_coalesced,
    for_lightning,
    is_out_of_memory,
    resolve_devices,
    to_device,
)
from evener.strategies.distributed.group import bound_device


class Moved:
    """Records how it is moved."""

    def to(self, device: torch.device, non_blocking: bool) -> tuple[str, bool]:
        return device.type, non_blocking


def test_lightning_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert [for_lightning(name) for name in ("gpu", "auto", "cpu")] == ["gpu", "auto", "cpu"]


@pytest.mark.parametrize(("device", "non_blocking"), [("cuda:0", True), ("mps:0", False), ("cpu", False)])
def test_only_copies_to_streams_are_asynchronous(
    device: str, non_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_is_present", lambda kind: True)
    moved = to_device(cast(Any, Moved()), torch.device(device))
    assert cast(Any, moved) == (device.partition(":")[0], non_blocking)


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


def test_a_name_without_an_index_means_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert resolve_devices(["cuda", "cpu", "mps"]) == [
        torch.device("cuda:0"), torch.device("cpu"), torch.device("mps:0"),
    ]  # fmt: skip


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


@pytest.mark.parametrize("bucket_bytes", [1, 30, 2**20])
def test_a_coalesced_copy_between_devices_is_exact(bucket_bytes: int) -> None:
    """`meta` stands for another device in the transfer; the values are checked on one device."""
    sources = [torch.arange(6.0).view(2, 3), torch.arange(3), torch.tensor(2.0), torch.arange(4.0, dtype=torch.float64)]
    targets = [torch.zeros_like(source) for source in sources]
    broadcast_coalesced(sources, [targets], bucket_bytes)
    torch.testing.assert_close(targets, sources, rtol=0, atol=0)
    broadcast_coalesced(sources, [[target.to("meta") for target in targets]], bucket_bytes)
