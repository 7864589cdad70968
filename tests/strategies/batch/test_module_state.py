"""A step that is run only to see its result leaves the module as it was."""

from collections import deque
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import BalancedDataParallelStrategy, SingleDeviceStrategy
from evener.strategies.batch.exact.module_state import ModuleState
from evener.strategies.core.module_state import untraced_step
from evener.trainer import Trainer

FOUND: list[Tensor] = []
"""What hooks have seen since the last call of `Capturing` began."""


def keep(part: nn.Module, args: Any, out: Tensor) -> None:
    FOUND.append(out)


class Capturing(nn.Module):
    """Registers a hook when it is first called, as models of transformers do, and returns what the hook saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "has_hook"):
            self.has_hook = True
            self.layer.register_forward_hook(keep)
        FOUND.clear()
        return self.layer(self.layer(x)), torch.stack(FOUND)


class Collecting(pl.LightningModule):
    """What the hook saw is a part of the loss, of which the graph does not show that it is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Capturing()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out, found = self.net(batch)
        return out.sin().sum(1).mean() + found.square().mean(2).mean(1).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(Collecting):
    """Replaces a buffer in each step, and keeps losses in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.seen: dict[str, list[float]] = {"losses": []}
        self.last = deque([7.0], maxlen=1)
        self.trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count = self.count + 1
        loss = super().training_step(batch, batch_idx)
        self.seen["losses"].append(float(loss.detach()))
        self.last.append(float(loss.detach()))
        return loss


def test_a_trial_leaves_no_hook_and_nothing_in_dicts() -> None:
    module = Counting()
    before, state = module.count, ModuleState(module)
    module.training_step(torch.ones(3, 2, dtype=torch.float64), 0)
    state.restore()
    assert module.count is before
    assert float(before) == 0
    assert not hasattr(module.net, "has_hook")
    assert not module.net.layer._forward_hooks
    assert module.seen == {"losses": []}
    assert list(module.last) == [7.0]


def test_a_trial_leaves_no_hook_on_a_parameter() -> None:
    # Cause: only hooks of modules were restored, so that each trial of a loss scaled the gradient once more.
    module = Counting()
    weight = module.net.layer.weight
    weight.register_hook(lambda gradient: gradient * 2)
    state = ModuleState(module)
    weight.register_hook(lambda gradient: gradient * 3)
    weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())  # type: ignore[union-attr]
    state.restore()
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_buffer_that_a_step_replaces_is_restored() -> None:
    module = Counting()
    before = module.count
    with untraced_step(module):
        module.training_step(torch.ones(3, 2, dtype=torch.float64), 0)
        assert float(module.count) == 1
    assert module.count is before
    assert float(module.count) == 0


def trained(strategy: Any, devices: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Collecting()
    data = list(torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    trainer = Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader[Any](data, 2))  # type: ignore[arg-type]
    return module.state_dict()


def test_hooks_of_a_first_step_are_there_once_where_the_first_device_has_no_samples() -> None:
    # Cause: the loss was tried on the root, which had not run a step; each trial left a hook, 18 in all.
    found = trained(BalancedDataParallelStrategy(gpu0_chunk=0), 2)
    torch.testing.assert_close(found, trained(SingleDeviceStrategy(), 1), rtol=0, atol=1e-10)
