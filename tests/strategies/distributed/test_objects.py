"""Objects travel between ranks as CPU tensors, in pieces; on CUDA the process group has a backend for them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor

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
    objects.SMALL_BYTES = 500
    sent: list[tuple[str, str, int]] = []

    def spying(name: str) -> None:
        call = getattr(dist, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            tensor: Tensor = args[name == "all_gather"]
            sent.append((name, tensor.device.type, tensor.nbytes))
            return call(*args, **kwargs)

        setattr(dist, name, spy)

    for name in ("gather", "all_gather", "broadcast"):
        spying(name)
    rank = dist.get_rank()
    value = {"rank": rank, "x": torch.full((100 + 400 * rank,), float(rank)), "names": ["a"] * rank}
    on_all = objects.gather_objects(value)
    on_first = objects.gather_objects(value, only_first=True)
    whole = sent.copy()
    sent.clear()
    assert objects.gather_objects("a" * 100 * (rank + 1)) == ["a" * 100, "a" * 200]
    assert objects.gather_objects(rank, only_first=True) == ([] if rank else [0, 1])
    small = [name for name, _, _ in sent]
    texts = [objects.broadcast_object(letter * length * rank, src=1) for letter, length in (("b", 400), ("c", 5000))]
    assert texts == ["b" * 400, "c" * 5000]
    dist.destroy_process_group()
    return [_plain(part) for part in on_all], on_first and [_plain(part) for part in on_first], whole, small


def _plain(value: Any) -> Any:
    return value["rank"], len(value["x"]), float(value["x"].mean()), value["names"]


def test_objects_travel_as_cpu_tensors_and_small_ones_at_once() -> None:
    expected = [(0, 100, 0.0, []), (1, 500, 1.0, ["a"])]
    (all_0, first_0, sent, small), (all_1, first_1, sent_1, _) = run_ranks(_exchanged, 2)
    assert all_0 == all_1 == first_0 == expected
    assert first_1 == []
    assert sent == sent_1
    assert {device for _, device, _ in sent} == {"cpu"}
    assert small == ["gather", "broadcast"] * 2
