"""A step that is run only to see its result leaves the module as it was."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import BalancedDataParallelStrategy, ModelParallelStrategy, SingleDeviceStrategy

FOUND: list[Tensor] = []
"""What hooks have seen since the last call of `Capturing` began."""


class Capturing(nn.Module):
    """Registers a hook when it is first called, as models of transformers do, and returns what the hook saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).double()
        self.has_hook = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_hook:
            self.has_hook = True
            self.layer.register_forward_hook(lambda layer, args, out: FOUND.append(out))
        FOUND.clear()
        return self.layer(self.layer(x)), torch.stack(FOUND)


class Counting(pl.LightningModule):
    """Replaces a buffer in each step, keeps losses, and registers hooks in the first; what one saw is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Capturing()
        self.register_buffer("count", torch.zeros(()))
        self.has_hook = False
        self.seen: dict[str, list[float]] = {"losses": []}
        self.last = deque([7.0], maxlen=1)
        self.owned = SimpleNamespace(calls=0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count = self.count + 1
        self.owned.calls += 1
        if not self.has_hook:  # only hooks of modules were restored: each trial of a loss scaled the gradient once more
            self.net.layer.weight.register_hook(lambda gradient: gradient * 3)
            self.has_hook = True
        out, found = self.net(batch)
        loss = out.sin().sum(1).mean() + found.square().mean(2).mean(1).sum()
        self.seen["losses"].append(float(loss.detach()))
        self.last.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any, devices: int) -> Counting:
    torch.manual_seed(3)
    module = Counting()
    data = list(torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    quiet_trainer(strategy, devices, max_epochs=1).fit(module, DataLoader[Any](data, 2))  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        # Cause: the loss was tried on the root, which had not run a step; each trial left a hook, 18 in all.
        (lambda: BalancedDataParallelStrategy(gpu0_chunk=0), 2),
        (lambda: ModelParallelStrategy(num_microbatches=2), 1),
    ],
)
def test_what_is_looked_at_before_the_first_step_leaves_no_trace(strategy: Any, devices: int) -> None:
    found, expected = trained(strategy(), devices), trained(SingleDeviceStrategy(), 1)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=1e-10)
    for one in (found, expected):
        assert float(one.count) == one.owned.calls == len(one.seen["losses"]) == 3
        assert len(one.last) == 1
        assert len(one.net.layer._forward_hooks) == len(one.net.layer.weight._backward_hooks) == 1
