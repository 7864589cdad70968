"""Everything that a replica uses is on its device: proved on fake devices, as repeated CPUs can't tell.

What real accelerators add (streams, threads, transfers that do not wait) runs in the tests that need a GPU, below.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import pytorch_lightning as pl
import torch
from cutting import join, split
from lightning_fabric.utilities import move_data_to_device
from parity import CASES, assert_equal, baseline, run
from placement_check import FakeDevices
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evener.strategies import BalancedDataParallelStrategy, DataParallelStrategy, ModelParallelStrategy
from evener.strategies.core import executor, side_streams
from evener.strategies.pipeline import layout as pipeline_layout
from evener.strategies.pipeline.layout import StageLayout
from evener.strategies.pipeline.options import StageOptions
from evener.strategies.pipeline.stages import Stages
from evener.strategies.replicas.layout import ReplicaLayout
from evener.strategies.replicas.runner import ReplicaRunner


def frozen(module: Any) -> Any:
    """In eval mode, without gradients: a torch built without CUDA aborts where a graph begins on a GPU."""
    return module.eval().requires_grad_(False)


class Everything(pl.LightningModule):
    """Tied weights, buffers, a plain tensor, a plain list, a recurrent module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.net[0].weight
        self.recurrent = nn.LSTM(4, 4)
        self.register_buffer("scale", torch.ones(3))
        self.layers = [self.net[0]]
        self.plain: Tensor | None = None

    def step(self, batch: Any) -> Any:
        x, names = batch
        assert x.device == self.device
        hidden = self.tied(self.layers[0](x)) + self.recurrent._flat_weights[0].sum()
        out = self.net(hidden) * self.scale + self.plain + torch.ones(3, device=self.device)
        return {"out": out, "names": names, "mean": hidden.mean()}


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # what a GPU that is not there lacks
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by nn.RNN, of CUDA builds
@pytest.mark.parametrize("second", ["cuda:1", "cpu"])
def test_replicas_use_their_own_device_only(monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    monkeypatch.setattr(executor, "on_device", lambda *_: nullcontext())  # there is no such device to make current
    sizes, devices = [2, 3], [torch.device("cuda", 0), torch.device(second)]
    with FakeDevices(2) as fake:
        module = frozen(Everything().to(devices[0]))
        module.plain = torch.ones(3).to(devices[0])
        layout = ReplicaRunner(module, devices, threads=False)
        with fake._fake:
            batch = (fake.to_fake(torch.randn(5, 4), devices[0]), list("abcde"))
            for _ in range(2):  # the second time with tensors that were refreshed
                outputs = layout.run("step", [((chunk,), {}) for chunk in split(batch, sizes)], sizes)
                layout.replicas.mark_changed()
                layout.replicas.root.scale.add_(1)
        assert [output["out"].device for output in outputs] == devices
        replica = layout.replicas[1]
        assert {tensor.device for tensor in (*replica.parameters(), *replica.buffers())} == {devices[1]}
        assert (replica.device, replica.plain.device) == (devices[1],) * 2
        joined = join(outputs, sizes, devices[0])
    assert (joined["out"].device, joined["out"].shape, joined["names"]) == (devices[0], (5, 3), list("abcde"))
    assert joined["mean"].device == devices[0]


class Halves(pl.LightningModule):
    """Two parts, each with a parameter and a buffer, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def step(self, x: Tensor) -> Tensor:
        assert x.device == self.device
        return self.second(self.first(x))


def test_stages_of_a_replica_use_its_own_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "on_device", lambda *_: nullcontext())
    with FakeDevices(4) as fake:
        module, devices = frozen(Halves()), fake.devices
        blocks = [devices[:2], devices[2:]]
        stages = Stages(devices[:2], StageOptions(partition=["second"], output_device="first"))
        stages.place(module)
        runner = ReplicaRunner(module, [devices[0], devices[2]], threads=False, blocks=blocks, stages=stages)
        with fake._fake:
            chunks = [fake.to_fake(torch.randn(size, 4), device) for size, device in ((2, devices[0]), (3, devices[0]))]
            for _ in range(2):
                outputs = runner.run("step", [((chunk,), {}) for chunk in chunks], [2, 3])
                runner.replicas.mark_changed()
                module.second[1].running_mean.add_(1)  # pyright: ignore[reportCallIssue]  # a buffer
        assert [output.device for output in outputs] == [devices[0], devices[2]]
        for replica, block in zip((runner.replicas[0], runner.replicas[1]), blocks, strict=True):
            for part, device in zip((replica.first, replica.second), block, strict=True):
                assert {tensor.device for tensor in (*part.parameters(), *part.buffers())} == {device}


class Holds(pl.LightningModule):
    """Notes the bytes of what a step has of the batch, by device."""

    held: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        Holds.held[str(x.device)] = x.nbytes + y.nbytes
        return self.layer(x).sum()


@pytest.mark.parametrize("sizes", [[2, 3], [0, 5]])  # the second as under gpu0_chunk=0
def test_each_device_gets_its_chunk_from_the_host_and_no_more(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(executor, "on_device", lambda *_: nullcontext())
    moved: dict[str, int] = {}

    def move(value: Any, device: torch.device) -> Any:
        moved[str(device)] = moved.get(str(device), 0) + sum(
            t.nbytes for t in tree_leaves(value) if isinstance(t, Tensor)
        )
        return move_data_to_device(value, device)

    monkeypatch.setattr(side_streams, "move_data_to_device", move)
    with FakeDevices(2) as fake:
        runner = ReplicaRunner(frozen(Holds().to(fake.devices[0])), fake.devices, threads=False)
        batch = (torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
        Holds.held.clear()
        with fake._fake:
            runner.run("step", [((chunk,), {}) for chunk in split(batch, sizes)], sizes)
    # a sample has 4 float32 and 1 int64
    expected = {f"cuda:{i}": size * 24 for i, size in enumerate(sizes) if size}
    assert Holds.held == expected
    assert moved == expected


class SeesBatch(pl.Callback):
    """Receives every batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """May use it on the root device."""


@pytest.mark.parametrize("callbacks", [[], [ModelCheckpoint(), TQDMProgressBar()], [ModelCheckpoint(), SeesBatch()]])
def test_a_batch_waits_on_the_host_unless_a_hook_receives_it(callbacks: list[pl.Callback]) -> None:
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    module: Any = Holds()
    module.trainer = SimpleNamespace(lightning_module=module, callbacks=callbacks, datamodule=None)
    layout = ReplicaLayout(devices)
    layout._module = module
    layout._runner = cast(ReplicaRunner, object())
    sees = any(isinstance(callback, SeesBatch) for callback in callbacks)
    assert layout.meeting_device == (devices[0] if sees else torch.device("cpu"))
    layout.devices = [devices[0]] * 2
    assert layout.meeting_device == devices[0]


class Chain(Holds):
    """Two parts; notes what a step has of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))


def test_the_last_stage_gets_one_micro_batch_at_a_time_from_the_host() -> None:
    batch = (torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    with FakeDevices(2) as fake:
        module = Chain().eval()
        stages = Stages(fake.devices, StageOptions(partition=["layer.1"], num_microbatches=2))
        stages.place(module)
        with fake._fake:
            for chunk, size in zip(split(batch, [2, 3]), [2, 3], strict=True):
                Holds.held.clear()
                with stages.fed(chunk) as fed:
                    module.step(fed)
                assert Holds.held == {"cuda:1": size * 24}  # a sample has 4 float32 and 1 int64
            with stages.fed(fed) as again:  # what a hook has moved before stays
                assert again is fed


@pytest.mark.parametrize(
    ("callbacks", "num", "where"), [([], 2, "cpu"), ([SeesBatch()], 2, "cuda:1"), ([], 1, "cuda:1")]
)
def test_a_batch_of_micro_batches_waits_on_the_host(callbacks: list[pl.Callback], num: int, where: str) -> None:
    module: Any = Chain()
    module.trainer = SimpleNamespace(lightning_module=module, callbacks=callbacks, datamodule=None)
    layout = StageLayout([torch.device("cuda", 0), torch.device("cuda", 1)], StageOptions(num_microbatches=num))
    layout._module = module
    assert layout.meeting_device == torch.device(where)


def test_micro_batches_that_wait_on_the_host_train_as_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_layout, "is_accelerator", lambda device: True)
    strategy = ModelParallelStrategy(["cpu", "cpu"], num_microbatches=2)
    assert_equal(run(CASES["ragged"], strategy), baseline(CASES["ragged"]), 1e-10)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: this machine has none")


@needs_gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the trainer itself is on the CPU here
@pytest.mark.parametrize(
    "name", ["ragged", "accumulation_with_a_short_tail", "loss_weight", "tied_frozen_parameter_list"]
)
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cuda:0", "cpu"]])
def test_training_on_a_gpu_equals_one_device(name: str, devices: list[str]) -> None:
    assert_equal(run(CASES[name], "dp", devices=devices), baseline(CASES[name]), 1e-8)


@needs_gpu
@pytest.mark.parametrize("policy", [{"gpu0_chunk": 1}, {"weights": [1, 2]}, {"weights": "auto"}])
def test_balanced_training_on_a_gpu_equals_one_device(policy: dict[str, Any]) -> None:
    strategy = BalancedDataParallelStrategy(devices=["cuda:0", "cuda:0"], **policy)
    found = run(CASES["ragged"], strategy, accelerator="cuda", devices=1)
    assert_equal(found, baseline(CASES["ragged"]), 1e-8)


@needs_gpu
def test_two_gpus_equal_one_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: this machine has one")
    found = run(CASES["ragged"], DataParallelStrategy(), accelerator="cuda", devices=2)
    assert_equal(found, baseline(CASES["ragged"]), 1e-8)
