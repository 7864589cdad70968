"""Placement, proved on fake devices: no accelerator is needed."""

import pytest
import pytorch_lightning as pl
import torch
from placement_check import FakeDevices, prove_placement
from torch import Tensor, nn

from evener.examples.char_lm import CharLM
from evener.strategies import ConfigError
from evener.strategies.pipeline.options import Partition, StageOptions
from evener.strategies.pipeline.stages import Stages

CPU = torch.device("cpu")


class Twin(pl.LightningModule):
    """The classic module on two devices, placed by hand."""

    def __init__(self, devices: list[torch.device], wrong: bool = False) -> None:
        super().__init__()
        self.devices, self.wrong = devices, wrong
        self.first = nn.Linear(10, 10)
        self.second = nn.Sequential(nn.ReLU(), nn.Linear(10, 5, device=devices[1]))
        self.first.to(devices[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.devices[0]))
        return self.second(x if self.wrong else x.to(self.devices[1]))


class Mixed(pl.LightningModule):
    """Its forward adds the outputs of two parts: they must be on one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class Masked(nn.Module):
    """Takes its mask as a keyword, as attention does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x) if mask is None else self.linear(x) * mask


class Norms(pl.LightningModule):
    """Buffers, batch statistics, a convolution, a keyword argument made on the device of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.mix = nn.LayerNorm(8)
        self.masked = Masked(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[2], 1, device=self.device)
        x = torch.relu(self.norm(self.conv(x))).transpose(1, 2)
        return self.head(self.masked(self.mix(x), mask=mask))


def proved(module: pl.LightningModule, num_stages: int, partition: Partition, *args: Tensor, **options: str) -> Tensor:
    layout = Stages([CPU] * num_stages, StageOptions(partition=partition, **options))  # pyright: ignore[reportArgumentType]
    layout.place(module)
    return prove_placement(module, layout, args)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_every_operation_of_the_transformer_sees_one_device(num_stages: int, tied: bool) -> None:
    module = CharLM(width=8, num_blocks=4, num_heads=2, max_length=6, tie_embedding=tied)
    out = proved(module, num_stages, "auto", torch.zeros(2, 6, dtype=torch.long))
    # a tied head is on stage 0, and so is what meets its output
    assert out.device == torch.device("cuda", 0 if tied else num_stages - 1)
    assert out.shape[:2] == (2, 6)


@pytest.mark.parametrize("partition", ["auto", ["mix", "head"]])
def test_every_operation_of_other_layers_sees_one_device(partition: Partition) -> None:
    assert proved(Norms(), 3, partition, torch.randn(4, 3, 5)).device == torch.device("cuda:2")


def test_outputs_meet_on_the_first_device_if_asked() -> None:
    assert proved(Norms(), 2, ["mix"], torch.randn(4, 3, 5), output_device="first").device == torch.device("cuda:0")


def test_a_forward_that_mixes_stages_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Module Mixed \(the root\) uses tensors on different devices"):
        proved(Mixed(), 2, "auto", torch.randn(2, 4))


def test_the_proof_leaves_the_module_as_it_was() -> None:
    module = Norms().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    proved(module, 2, "auto", torch.randn(4, 3, 5))
    assert all(child.training for child in module.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_right_manual_placement_passes() -> None:
    with FakeDevices(2) as fake:
        out = fake.run(Twin(fake.devices), torch.randn(3, 10))
    assert (out.device, tuple(out.shape)) == (torch.device("cuda:1"), (3, 5))


def test_wrong_manual_placement_fails_and_names_the_module() -> None:
    with FakeDevices(2) as fake, pytest.raises(ConfigError, match=r"Module second\.1 uses tensors .* cuda:0"):
        fake.run(Twin(fake.devices, wrong=True), torch.randn(3, 10))


def test_a_layer_left_on_the_cpu_fails_too() -> None:
    with FakeDevices(2) as fake:
        module = Twin(fake.devices)
        module.first = nn.Linear(10, 10)
        with pytest.raises(ConfigError, match="Module first uses tensors"):
            fake.run(module, torch.randn(3, 10))
