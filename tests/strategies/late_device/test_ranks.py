"""Ranks on late devices, an accelerator that neither torch nor Lightning knows, equal one CPU."""

import warnings
from collections.abc import Callable
from typing import Any

import late_device
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from late_device import needs_late_device
from parity import CASES, Run, baseline, run
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import DDPModelParallelStrategy, DDPStrategy, FSDPStrategy

pytestmark = needs_late_device

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPStrategy(batch_size_is="global", timeout_s=60),
    "fsdp": lambda: FSDPStrategy(batch_size_is="global", timeout_s=60),
    "ddp of replicas": lambda: DDPStrategy(batch_size_is="global", devices_per_process=2, timeout_s=60),
    "ddp_model_parallel": lambda: DDPModelParallelStrategy(batch_size_is="global", num_microbatches=2, timeout_s=60),
}


def _trained(names: list[str], case: str, num_devices: int) -> tuple[list[Run], str]:
    warnings.simplefilter("ignore")
    per_rank = {"ddp of replicas": 2, "ddp_model_parallel": 2}
    found = [
        run(CASES[case], STRATEGIES[name](), accelerator="late", devices=num_devices * per_rank.get(name, 1))
        for name in names
    ]
    return found, dist.get_backend_config()


@pytest.mark.parametrize(
    ("names", "num_ranks"),
    [(["ddp", "fsdp"], 2), (["ddp of replicas", "ddp_model_parallel"], 2), (["ddp", "fsdp"], 3)],
)
def test_ranks_on_an_accelerator_of_its_own_kind_equal_one_cpu(names: list[str], num_ranks: int) -> None:
    # Failed before: all but CUDA got gloo alone, which can't send their tensors, and DDP used torch.cuda's streams;
    # torch's FSDP moved parameters by `tensor.data = ...`, which torch refuses for devices that are not its own.
    expected = baseline(CASES["ragged"])
    for runs, backend in late_device.run_ranks(_trained, num_ranks, names, "ragged", num_ranks):
        assert backend == "cpu:gloo,late:late_gloo"
        for found in runs:
            assert (found.gradients - expected.gradients).abs().max() <= 1e-10
            assert (found.weights - expected.weights).abs().max() <= 1e-10
            metrics = {name: float(value) for name, value in expected.metrics.items()}
            assert {name: float(value) for name, value in found.metrics.items()} == pytest.approx(metrics, abs=1e-6)


class _Unsteady(torch.autograd.Function):
    """Has a gradient that no two ranks compute to the last bit, as kernels that add in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 + 1e-13 * dist.get_rank())


class Unsteady(pl.LightningModule):
    """Multiplies by a weight whose gradient each rank computes itself, and rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (batch[0].double() @ _Unsteady.apply(self.weight)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _unsteady() -> Tensor:
    warnings.simplefilter("ignore")
    module = Unsteady()
    quiet_trainer(
        strategy=DDPStrategy(batch_size_is="global", global_view=True, timeout_s=60),
        accelerator="late",
        devices=2,
        max_epochs=1,
    ).fit(module, DataLoader(TensorDataset(torch.linspace(-2, 2, 24).reshape(6, 4)), batch_size=6))
    return module.weight.detach().cpu()


def test_global_view_keeps_ranks_equal_where_their_kernels_round_otherwise() -> None:
    # Failed before: "the ranks have different values of weight" (a GAN's transposed convolutions on one GPU).
    first, second = late_device.run_ranks(_unsteady, 2)
    assert torch.equal(first, second)
    x = torch.linspace(-2, 2, 24).reshape(6, 4).double()
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    expected = weight - 0.1 * 2 / 18 * x.T @ (x @ weight)  # one step: the mean has 6 * 3 elements
    assert torch.allclose(first, expected, rtol=0, atol=1e-10)
