"""Ranks on late devices, an accelerator that neither torch nor Lightning knows, equal one CPU."""

import warnings
from collections.abc import Callable
from typing import Any

import late_device
import pytest
import torch.distributed as dist
from late_device import needs_late_device
from parity import CASES, Run, baseline, run

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
