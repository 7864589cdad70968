"""Modules to cut into stages: one whose parts are used out of order, and one with tied weights."""

from parity import Case, Net
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block whose activation works in place on its input's copy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x + self.activation(self.linear(x))
        return x if shift is None else x + shift


class DeepNet(Net):
    """Six parts; the first one's output goes to the last block, too, past those between."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"enter": nn.Linear(4, 6)})
        self.net["blocks"] = nn.ModuleList(Block(6) for _ in range(4))
        self.net["leave"] = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = shift = self.net["enter"](x)
        for index, block in enumerate(self.net["blocks"]):
            x = block(x, shift=shift if index == 3 else None)
        return self.net["leave"](x)


class SquareNet(Net):
    """Its head is tied to its first layer: stage 0 is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), Block(4), Block(4), nn.Linear(4, 4))
        self.net[3].weight = self.net[0].weight


DEEP = Case(DeepNet, num=22, batch_size=5, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
