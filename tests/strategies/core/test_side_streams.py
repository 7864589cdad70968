"""Copies beside the work of two GPUs, shown with fake streams: what each operation waits for, in both directions.

`meta` stands for the second GPU: tensors there have no values, and copies to it and back work.
"""

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from evener.strategies.core import side_streams
from evener.strategies.core.side_streams import cross, finish_copy, from_host, on_incoming, start_copy

HERE, THERE = torch.device("cpu"), torch.device("meta")


class Op:
    """Something queued on a stream, and what must be finished before it begins."""

    def __init__(self, name: str, after: list["Op"]) -> None:
        self.name = name
        self.after = after

    def waits_for(self) -> set[str]:
        return {name for op in self.after for name in ({op.name} | op.waits_for())} - {""}


class Event:
    """Marks a place in a stream."""

    at: Op | None = None

    def record(self, stream: "Stream") -> None:
        self.at = stream.last


class Stream:
    """Runs what is queued in order, as CUDA does."""

    def __init__(self, device: torch.device, name: str = "") -> None:
        self.device = device
        self.last: Op | None = None
        self.name = name

    def queue(self, name: str, *after: Op | None) -> Op:
        self.last = Op(name, [op for op in (self.last, *after) if op is not None])
        return self.last

    def wait_event(self, event: Event) -> None:
        self.queue("", event.at)

    def wait_stream(self, stream: "Stream") -> None:
        self.queue("", stream.last)


class FakeCUDA:
    """`torch.cuda` as far as `side_streams` uses it, with one main stream per device."""

    Event = Event

    def __init__(self) -> None:
        self.current = {device: Stream(device, "main") for device in (HERE, THERE)}
        self.recorded: list[tuple[int, str]] = []
        self.num_copies = 0

    def Stream(self, device: torch.device) -> Stream:
        return Stream(device, "side")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current[device]

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before, self.current[stream.device] = self.current[stream.device], stream
        yield
        self.current[stream.device] = before

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """As torch does it: on the source's current stream, behind a barrier between the current streams of both."""
        self.num_copies += 1
        source, target = self.current[tensor.device], self.current[device]
        op = source.queue(f"copy {self.num_copies}", target.last)
        target.queue("", op)
        return torch.ones_like(tensor, device=device)  # `meta` has no values to copy


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCUDA:
    fake = FakeCUDA()
    mocked = SimpleNamespace(**{name: getattr(torch, name) for name in ("is_grad_enabled", "autograd", "device")})
    mocked.cuda = fake
    monkeypatch.setattr(side_streams, "torch", mocked)
    monkeypatch.setattr(side_streams, "_STREAMS", {})
    monkeypatch.setattr(side_streams, "to_device", fake.copy)
    monkeypatch.setattr(side_streams, "copies_beside", lambda source, target: source != target)

    def work_so_far(device: torch.device) -> Event:
        event = Event()
        event.record(fake.current[device])
        return event

    monkeypatch.setattr(side_streams, "work_so_far", work_so_far)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: fake.recorded.append((id(tensor), stream.name)), raising=False
    )
    return fake


def test_a_copy_waits_for_its_source_and_delays_neither_device(cuda: FakeCUDA) -> None:
    here, there = cuda.current[HERE], cuda.current[THERE]
    here.queue("makes the tensor")
    there.queue("earlier work")
    tensor = torch.ones(2)
    copies = start_copy([tensor], THERE)
    own_work = there.queue("own work")
    more = here.queue("more")
    finish_copy(copies, HERE)
    uses = there.queue("uses the copy")
    assert more.waits_for() == {"makes the tensor"}
    assert own_work.waits_for() == {"earlier work"}
    assert uses.waits_for() == {"makes the tensor", "copy 1", "earlier work", "own work"}
    assert cuda.recorded == [(id(tensor), "side"), (id(copies[0]), "main")]  # neither's memory is used again too early


def test_work_on_the_incoming_stream_follows_the_copy_alone(cuda: FakeCUDA) -> None:
    cuda.current[THERE].queue("own work")
    start_copy([torch.ones(2)], THERE)
    with on_incoming(HERE, THERE):
        added = cuda.current[THERE].queue("add")
    assert added.waits_for() == {"copy 1"}
    assert cuda.current[THERE].name == "main"


def test_inputs_that_were_ready_before_do_not_wait_for_later_work(cuda: FakeCUDA) -> None:
    ready = side_streams.work_so_far(HERE)
    cuda.current[HERE].queue("last stage of the first micro-batch")
    cross([torch.ones(2)], THERE, ready)
    first_stage = cuda.current[THERE].queue("first stage of the second micro-batch")
    assert first_stage.waits_for() == {"copy 1"}


def test_the_next_batch_is_copied_while_the_device_computes_this_one(
    cuda: FakeCUDA, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = cuda.current[THERE]
    copies: list[Op] = []

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        copies.append(cuda.current[device].queue(f"copy of batch {len(copies) + 1}"))
        return tensor.clone()

    monkeypatch.setattr(side_streams, "fills_beside", lambda device: device == THERE)
    monkeypatch.setattr(side_streams, "to_device", copy)
    monkeypatch.setattr(side_streams, "move_data_to_device", lambda batch, device: batch)
    mocked = side_streams.torch
    mocked.strided = torch.strided
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    from_host({"x": torch.ones(2)}, THERE)
    step = there.queue("step 1")
    from_host({"x": torch.ones(2)}, THERE)
    assert step.waits_for() == {"copy of batch 1"}
    assert copies[1].waits_for() == {"copy of batch 1"}
    assert there.queue("step 2").waits_for() == {"copy of batch 1", "step 1", "copy of batch 2"}
    assert [name for _, name in cuda.recorded] == ["main", "main"]  # what was copied lives as long as the steps


def test_gradients_go_back_beside_the_work_of_both(cuda: FakeCUDA) -> None:
    own = nn.Parameter(torch.ones(2))
    cuda.current[HERE].queue("forward")
    moved, counts, mask = cross([own, torch.arange(3), torch.ones(3)], THERE)
    assert [tensor.requires_grad for tensor in (moved, counts, mask)] == [True, False, False]
    cuda.current[HERE].queue("next forward")
    cuda.current[THERE].queue("backward there")
    (moved * 2).sum().backward()
    back = cuda.current[HERE].queue("backward here")
    assert own.grad is not None
    assert {"copy 4", "backward there", "next forward"} <= back.waits_for()
    assert "next forward" not in cuda.current[THERE].queue("more there").waits_for()


def test_without_gradients_and_on_one_device_nothing_is_recorded(cuda: FakeCUDA) -> None:
    with torch.no_grad():
        (moved,) = cross([nn.Parameter(torch.ones(2))], THERE)
    assert not moved.requires_grad
    cuda.recorded.clear()
    cross([torch.ones(2)], HERE)
    assert cuda.recorded == []
    assert cross([], THERE) == []
