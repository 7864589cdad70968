"""Ranks on late devices, an accelerator that neither torch nor Lightning knows, equal one CPU."""

import warnings
from collections.abc import Callable
from typing import Any

import late_device
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from late_device import needs_late_device
from parity import CASES, Run, assert_equal, baseline, run
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import DDPModelParallelStrategy, DDPStrategy, FSDPStrategy

pytestmark = needs_late_device

STRATEGIES: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "ddp": (DDPStrategy, {}, 1),
    "fsdp": (FSDPStrategy, {}, 1),
    "ddp of replicas": (DDPStrategy, {"devices_per_process": 2}, 2),
    "ddp_model_parallel": (DDPModelParallelStrategy, {"num_microbatches": 2}, 2),
}
"""Strategies, their options, and the devices of a rank."""


def _trained() -> tuple[list[Run], str]:
    warnings.simplefilter("ignore")
    found = []
    for kind, options, num_devices in STRATEGIES.values():
        late_device.keep_freed(kind is FSDPStrategy)  # else a look at a few samples read poison, now and then
        strategy = kind(batch_size_is="global", timeout_s=60, **options)
        found.append(run(CASES["ragged"], strategy, accelerator="late", devices=2 * num_devices))
    return found, dist.get_backend_config()


def test_ranks_on_an_accelerator_of_its_own_kind_equal_one_cpu() -> None:
    # Failed before: all but CUDA got gloo alone, which can't send their tensors, and DDP used torch.cuda's streams;
    # torch's FSDP moved parameters by `tensor.data = ...`, which torch refuses for devices that are not its own.
    expected = baseline(CASES["ragged"])
    (first, backend), (second, _) = late_device.run_ranks(_trained, 2)
    assert backend == "cpu:gloo,late:late_gloo"
    for found, other in zip(first, second, strict=True):
        assert_equal(found, expected, 1e-10, of_a_rank=True)
        assert (other.weights - expected.weights).abs().max() <= 1e-10


class Totals(pl.LightningModule):
    """Adds a tensor of its device to a number, in steps of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1).double()
        self.total: Any = 0
        self.found: list[Any] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.total += batch[0].sum()

    def on_validation_epoch_end(self) -> None:
        self.found.append((self.total.device.type, float(self.total)))


def _totalled() -> list[Any]:
    warnings.simplefilter("ignore")
    module, data = Totals(), TensorDataset(torch.arange(5.0, dtype=torch.float64)[:, None])
    strategy = DDPStrategy(batch_size_is="global", timeout_s=60)
    quiet_trainer(strategy, 2, accelerator="late").validate(module, DataLoader(data, 4), verbose=False)
    return module.found


def test_counters_of_ranks_stay_on_their_device() -> None:
    assert late_device.run_ranks(_totalled, 2) == [[("late", 10.0)]] * 2  # of the last batch one rank has no sample


class Rounded(torch.autograd.Function):
    """Has a gradient that no two ranks compute to the last bit, as kernels that add in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 + 1e-13 * dist.get_rank())


X, WEIGHT = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(6, 4), torch.linspace(-1, 1, 12).double()


class Unsteady(pl.LightningModule):
    """Multiplies by a weight whose gradient each rank computes itself, and rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.reshape(4, 3).clone())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (batch[0] @ Rounded.apply(self.weight)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _unsteady() -> Tensor:
    warnings.simplefilter("ignore")
    module, strategy = Unsteady(), DDPStrategy(batch_size_is="global", global_view=True, timeout_s=60)
    quiet_trainer(strategy, 2, accelerator="late", max_epochs=1).fit(module, DataLoader(TensorDataset(X), 6))
    return module.weight.detach().cpu()


def test_global_view_keeps_ranks_equal_where_their_kernels_round_otherwise() -> None:
    # Failed before: "the ranks have different values of weight" (a GAN's transposed convolutions on one GPU).
    first, second = late_device.run_ranks(_unsteady, 2)
    assert torch.equal(first, second)
    weight = WEIGHT.reshape(4, 3)
    expected = weight - 0.1 * 2 / 18 * X.T @ (X @ weight)  # one step: the mean has 6 * 3 elements
    assert torch.allclose(first, expected, rtol=0, atol=1e-10)
