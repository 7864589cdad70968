"""Modules whose parts are on several devices train as on one CPU: an operation on two late devices would fail."""

import warnings
from collections.abc import Callable
from typing import Any

import late_device
import pytest
import pytorch_lightning as pl
import torch
from late_device import needs_late_device
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.examples.char_lm import CharLM
from evener.examples.digits import DigitsClassifier
from evener.examples.two_devices import TwoDeviceDigitsClassifier
from evener.strategies import DataParallelStrategy, ModelParallelStrategy, SingleDeviceStrategy

pytestmark = needs_late_device


class Masked(nn.Module):
    """Takes its mask as a keyword, as attention does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x) if mask is None else self.linear(x) * mask


class Everything(pl.LightningModule):
    """A layer used twice, a buffer, a plain tensor and list, a convolution, a keyword, a tensor made on its device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.mix = nn.LayerNorm(8)
        self.masked = Masked(8)
        self.listed = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.full((2,), 0.5))
        self.layers, self.plain = [self.listed], torch.ones(2).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        mask = torch.ones(x.shape[2], 1, device=self.device)
        mixed = self.mix(torch.relu(self.conv(x)).transpose(1, 2))
        hidden = self.masked(mixed, mask=mask)
        total = hidden.clone()  # what two parts computed meets: in place, in a list, by keywords, with a number
        total += mixed
        total.add_(torch.cat([mixed, hidden], 2)[..., 4:12], alpha=0.5)
        hidden = torch.where(mixed > 0, input=hidden, other=torch.tensor(2.0, dtype=x.dtype) * total)
        return (self.head(self.mix(self.layers[0](hidden))) * self.scale + self.plain.to(x.device)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _char_lm() -> CharLM:
    return CharLM(width=8, num_blocks=4, num_heads=2, max_length=6, warmup_steps=1)


def _rows(*shape: int) -> list[Any]:
    return [(row,) for row in torch.randn(6, *shape, generator=torch.Generator().manual_seed(1)).double()]


IMAGES = [(image, number % 10) for number, (image,) in enumerate(_rows(1, 8, 8))]
TEXT = list(torch.arange(42).reshape(6, 7) % 9 + 1)


def _stages(num: int, **options: Any) -> ModelParallelStrategy:
    return ModelParallelStrategy([f"late:{i}" for i in range(num)], **options)


CASES: dict[str, tuple[Callable[[], pl.LightningModule], list[Any], Callable[[], Any]]] = {
    **{f"char_lm, {num}": (_char_lm, TEXT, lambda num=num: _stages(num)) for num in (2, 3, 4)},
    "stages": (Everything, _rows(3, 5), lambda: _stages(3, num_microbatches=2)),
    "stages by name": (Everything, _rows(3, 5), lambda: _stages(2, partition=["mix"], output_device="first")),
    "dp": (Everything, _rows(3, 5), lambda: DataParallelStrategy(["late:0", "late:1"])),
    "by hand": (TwoDeviceDigitsClassifier, IMAGES, lambda: _stages(2, partition="manual")),
}


def _trained(make: Callable[[], pl.LightningModule], data: list[Any], strategy: Any, accelerator: str) -> Tensor:
    torch.manual_seed(3)
    module = make().double()
    quiet_trainer(strategy, accelerator=accelerator).fit(module, DataLoader(data, batch_size=3))
    return torch.cat([value.cpu().flatten() for value in module.state_dict().values()])


def _differences() -> dict[str, float]:
    warnings.simplefilter("ignore")
    found = {}
    for name, (make, data, strategy) in CASES.items():
        alone = DigitsClassifier if make is TwoDeviceDigitsClassifier else make
        expected = _trained(alone, data, SingleDeviceStrategy(), "cpu")
        found[name] = float((_trained(make, data, strategy(), "late") - expected).abs().max())
    return found


def test_modules_of_every_kind_train_as_on_one_cpu() -> None:
    found = late_device.run(_differences)
    assert found == pytest.approx(dict.fromkeys(CASES, 0.0), abs=1e-10)
