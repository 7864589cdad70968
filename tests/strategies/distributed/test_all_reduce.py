"""DDP of three ranks trains as one device, with sparse gradients, too, and with a callback's communication hook."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from distributed import run_ranks
from regression import Numbered, quiet_trainer
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy, SingleDeviceStrategy


class Words(pl.LightningModule):
    """An embedding, whose gradient is sparse or dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.layer = nn.Embedding(40, 3, sparse=sparse), nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(self.words(batch[0].long().flatten() % 40)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hooks(pl.Callback):
    """Registers a communication hook of its own, if asked to."""

    def __init__(self, registers: bool) -> None:
        self.registers, self.num_hooked = registers, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.registers:
            wrapper: Any = trainer.strategy.model
            wrapper.register_comm_hook(self, own_hook)


def own_hook(hooks: Hooks, bucket: dist.GradBucket) -> Future[Tensor]:
    hooks.num_hooked += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _trained(strategy: Any, devices: int, hooks: Hooks, sparse: bool) -> dict[str, Tensor]:
    module = Words(sparse)
    quiet_trainer(strategy, devices, callbacks=[hooks], max_steps=4).fit(module, DataLoader(Numbered(40), 6 // devices))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _on_ranks() -> list[Any]:
    hooks = [Hooks(registers) for registers in (False, False, True)]
    weights = [_trained(DDPStrategy(timeout_s=60), 3, hook, bool(i == 1)) for i, hook in enumerate(hooks)]
    return [weights, hooks[2].num_hooked]


def test_ddp_of_three_ranks_trains_as_one_device() -> None:
    expected = _trained(SingleDeviceStrategy(), 1, Hooks(registers=False), sparse=False)
    for all_weights, num_hooked in run_ranks(_on_ranks, 3):
        for weights in all_weights:
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert num_hooked == 4
