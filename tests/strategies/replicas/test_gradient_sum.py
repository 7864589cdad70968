"""What travels between replicas and the root, and what the root holds of it; on the CPU, by asking for `overlap`."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import Case, TiedNet, fit, make_module
from torch import Tensor, nn

from evener.strategies import DataParallelStrategy
from evener.strategies.core import devices as devices_module
from evener.strategies.replicas import _backward as room
from evener.strategies.replicas import replicas as replicas_room
from evener.strategies.replicas._backward import ReplicasBackward
from evener.strategies.replicas.replicas import Replicas

CPU = torch.device("cpu")
NUM_LAYERS, WIDTH = 8, 16
LAYER_BYTES = WIDTH * WIDTH * 4


class Alive:
    """Counts the bytes of tensors that were made for the root and are still there."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Any]] = []
        self.peak = 0

    def add(self, tensor: Tensor) -> Tensor:
        self.tensors.append(weakref.ref(tensor.untyped_storage()))
        storages = {s.data_ptr(): s.nbytes() for s in (ref() for ref in self.tensors) if s is not None}
        self.peak = max(self.peak, sum(storages.values()))
        return tensor


def networks(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    root = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    replicas = Replicas(root, [CPU] * num)
    return [replicas[i] for i in range(num)]


def peak_on_root(num: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the sum of a backward over `num` replicas holds on the root beside the root's gradients."""
    alive = Alive()

    def copied(tensors: Sequence[Tensor], device: torch.device, ready: Any = None) -> tuple[list[Tensor], None]:
        return [alive.add(tensor.clone()) for tensor in tensors], None

    monkeypatch.setattr(room, "start_copy", copied)
    modules = networks(num)
    parameters = [list(module.parameters()) for module in modules]
    whole = ReplicasBackward(parameters, overlap=True, bucket_bytes=LAYER_BYTES)
    x = torch.randn(3, WIDTH)
    whole.attach(torch.stack([module(x).sum() for module in modules]).sum()).backward()
    expected = torch.autograd.grad(modules[0](x).sum() * num, parameters[0])
    torch.testing.assert_close([p.grad for p in parameters[0]], list(expected))
    return alive.peak


def test_the_root_holds_one_sum_whatever_the_number_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [peak_on_root(num, monkeypatch) for num in (2, 3, 6)]
    # one running sum; from three replicas on one bucket more, which is being added to it
    assert peaks == [NUM_LAYERS * LAYER_BYTES, (NUM_LAYERS + 1) * LAYER_BYTES, (NUM_LAYERS + 1) * LAYER_BYTES]


def test_buckets_are_added_in_the_order_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in the order of arrival would differ from run to run."""
    order: list[float] = []

    def copied(tensors: Sequence[Tensor], device: torch.device, ready: Any = None) -> tuple[list[Tensor], None]:
        order.append(float(tensors[0][0]))
        return [tensor.clone() for tensor in tensors], None

    monkeypatch.setattr(room, "start_copy", copied)
    parameters = [[nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))] for _ in range(4)]
    whole = ReplicasBackward(parameters, overlap=True, bucket_bytes=1)
    loss = torch.zeros(())
    for i in (1, 0):  # what was computed last goes backward first: replica 3, 1, 2
        for replica in (2, 1, 3):
            loss = loss + (parameters[replica][i] * (replica + 10 * i)).sum()
    whole.attach(loss).backward()
    assert order == [1, 2, 3, 11, 12, 13]


def test_a_replica_without_samples_holds_up_no_other() -> None:
    parameters = [[nn.Parameter(torch.zeros(2))] for _ in range(4)]
    whole = ReplicasBackward(parameters, overlap=True, bucket_bytes=1)
    whole.attach(sum((parameters[replica][0] * replica).sum() for replica in (2, 3))).backward()
    assert parameters[0][0].grad is not None
    assert parameters[0][0].grad.tolist() == [5.0, 5.0]


def test_a_refresh_packs_the_parameters_once_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    moved: list[str] = []
    pack = devices_module.flattened

    def counted(tensors: Sequence[Tensor]) -> Tensor:
        packed.append(len(tensors))
        return pack(tensors)

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        moved.append(device.type)
        return tensor.to(device)

    monkeypatch.setattr(devices_module, "flattened", counted)
    monkeypatch.setattr(devices_module, "to_device", to_device)
    sources = [torch.ones(3), torch.ones(2, 2)]
    away = [[torch.empty_like(source, device="meta") for source in sources] for _ in range(3)]
    devices_module.broadcast_coalesced(sources, away)
    assert packed == [2]
    assert moved == ["meta"] * 3


class Frozen(TiedNet):
    """With a frozen layer, which is written to in the ways of `write` after the fourth step."""

    write = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4 and self.write == "data":
            self.frozen.weight.data.mul_(0.5)
        elif batch_idx == 4 and self.write == "data is set":
            self.frozen.weight.data = self.frozen.weight.data * 0.5
        elif batch_idx == 4 and self.write == "torch":
            with torch.no_grad():
                self.frozen.weight.mul_(0.5)
        elif batch_idx == 4 and self.write == "view":
            self.view.mul_(0.5)

    def on_train_start(self) -> None:
        if self.write == "view":
            self.view = self.frozen.weight.data


@pytest.mark.parametrize(
    ("write", "expected"),
    [("", []), ("torch", [5]), ("data", [5]), ("data is set", [5]), ("view", [1, 2, 3, 4, 5, 6, 7, 8, 9])],
)
def test_frozen_parameters_travel_only_after_a_write(
    write: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Frozen, num=40)
    module: Any = make_module(case)
    module.write = write
    frozen = {id(parameter) for parameter in module.frozen.parameters()}
    sent: dict[int, int] = {}
    copy = replicas_room.broadcast_coalesced

    def counted(sources: Sequence[Tensor], targets: Any) -> None:
        sent[module.global_step] = sum(source.nbytes for source in sources if id(source) in frozen)
        copy(sources, targets)

    monkeypatch.setattr(replicas_room, "broadcast_coalesced", counted)
    fit(case, module, DataParallelStrategy(), max_epochs=1, limit_val_batches=0)
    assert sent.pop(0) > 0  # hooks before the first step may write to everything
    assert list(sent) == list(range(1, 10))
    assert [step for step, num_bytes in sent.items() if num_bytes] == expected
