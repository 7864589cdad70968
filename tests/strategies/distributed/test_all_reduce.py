"""Small CPU tensors of three or more ranks are reduced through rank 0; larger and tiny ones, and those of two ranks, by
all_reduce.
"""

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
from evener.strategies.distributed import reduction

SUM, MAX, MIN, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT


def _count_all_reduces() -> list[Any]:
    calls: list[Any] = []
    own = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return own(*args, **kwargs)

    dist.all_reduce = counted
    return calls


def _reduced(limit: int) -> list[Any]:
    dist.init_process_group("gloo")
    reduction.SMALL_BYTES = limit
    calls, rank = _count_all_reduces(), dist.get_rank()
    grid = torch.arange(6.0).view(2, 3)
    results = [
        (torch.tensor(rank + 0.5), SUM),
        (torch.tensor([1, rank, 2], dtype=torch.uint8), SUM),
        ((grid + rank).T, SUM),  # not contiguous
        (torch.tensor([rank, -rank, float("inf")]), MAX),
        (torch.tensor([rank, -rank, 1]), MIN),
        (torch.full((3,), rank + 1.0, dtype=torch.bfloat16), SUM),
        (torch.tensor([complex(rank, 1)] * 3), SUM),
        (torch.zeros(0), SUM),
        (torch.full((3,), rank + 1.0), PRODUCT),
    ]
    for tensor, op in results:
        reduction.all_reduce(tensor, op)
    pair = dist.new_group([1, 2])
    alone = torch.tensor([float(rank)])
    if rank:
        reduction.all_reduce(alone, group=pair)
    dist.destroy_process_group()
    return [*(tensor.tolist() for tensor, _ in results), alone.tolist(), len(calls)]


EXPECTED = [
    4.5, [3, 3, 6], [[3.0, 12.0], [6.0, 15.0], [9.0, 18.0]], [2.0, 0.0, float("inf")], [0, -2, 1], [6.0] * 3,
    [3 + 3j] * 3, [], [6.0] * 3,
]  # fmt: skip


def test_tensors_are_reduced_by_either_way() -> None:
    through_first, all_reduced = run_ranks(_reduced, 3, 2**22), run_ranks(_reduced, 3, 0)
    for rank, (small, large) in enumerate(zip(through_first, all_reduced, strict=True)):
        assert small[:-1] == large[:-1] == [*EXPECTED, [3.0] if rank else [0.0]]
        pair = 1 if rank else 0
        assert (small[-1], large[-1]) == (3 + pair, len(EXPECTED) + pair)  # one number, none, a product


class Words(pl.LightningModule):
    """An embedding, sparse or not, and a layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.layer = nn.Embedding(40, 3, sparse=sparse), nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(self.words(batch[0].long().flatten() % 40)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps(pl.Callback):
    """Counts the calls of all_reduce within a step; registers a communication hook of its own, if asked to."""

    def __init__(self, registers: bool = False) -> None:
        self.registers, self.hooked = registers, 0
        self.calls = _count_all_reduces() if dist.is_initialized() else []
        self.per_step: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.registers:
            wrapper: Any = trainer.strategy.model
            wrapper.register_comm_hook(self, own_hook)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.per_step.append(len(self.calls))
        self.calls.clear()


def own_hook(steps: Steps, bucket: dist.GradBucket) -> Future[Tensor]:
    steps.hooked += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _trained(strategy: Any, steps: Steps, sparse: bool) -> dict[str, Tensor]:
    module = Words(sparse)
    devices = dist.get_world_size() if dist.is_initialized() else 1
    quiet_trainer(strategy, devices, callbacks=[steps], max_steps=4).fit(module, DataLoader(Numbered(40), 6 // devices))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _on_ranks() -> list[Any]:
    found = []
    for sparse, registers in ((False, False), (True, False), (False, True)):
        dist.init_process_group("gloo") if not dist.is_initialized() else None
        steps = Steps(registers)
        weights = _trained(DDPStrategy(timeout_s=60), steps, sparse)
        found.append((weights, steps.per_step[1:], steps.hooked))
    return found


def test_ddp_of_three_ranks_trains_as_one_device_by_either_way() -> None:
    expected = _trained(SingleDeviceStrategy(), Steps(), sparse=False)
    for dense, sparse, hooked in run_ranks(_on_ranks, 3):
        for weights, _, _ in (dense, sparse, hooked):
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert dense[1] == [0, 0, 0]
        assert sparse[1] == [1, 1, 1]  # rows of its own on each rank
        assert hooked[2] == 4
