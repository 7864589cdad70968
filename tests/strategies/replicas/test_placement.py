"""Replicas on a GPU equal one CPU; `late_device/` has what can be shown without one."""

from typing import Any

import pytest
import torch
from parity import CASES, Case, SparseNet, assert_equal, baseline, run

from evener.strategies import BalancedDataParallelStrategy, DataParallelStrategy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: this machine has none")


@needs_gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the trainer itself is on the CPU here
@pytest.mark.parametrize(
    "name", ["ragged", "accumulation_with_a_short_tail", "loss_weight", "tied_frozen_parameter_list"]
)
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cuda:0", "cpu"]])
def test_training_on_a_gpu_equals_one_device(name: str, devices: list[str]) -> None:
    assert_equal(run(CASES[name], "dp", devices=devices), baseline(CASES[name]), 1e-8)


@needs_gpu
def test_sparse_gradients_of_replicas_on_a_gpu_are_added() -> None:
    case = Case(SparseNet)
    assert_equal(run(case, "dp", devices=["cuda:0", "cuda:0"]), baseline(case), 1e-8)


@needs_gpu
@pytest.mark.parametrize("policy", [{"gpu0_chunk": 1}, {"weights": [1, 2]}, {"weights": "auto"}])
def test_balanced_training_on_a_gpu_equals_one_device(policy: dict[str, Any]) -> None:
    strategy = BalancedDataParallelStrategy(devices=["cuda:0", "cuda:0"], **policy)
    found = run(CASES["ragged"], strategy, accelerator="cuda", devices=1)
    assert_equal(found, baseline(CASES["ragged"]), 1e-8)


@needs_gpu
def test_two_gpus_equal_one_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: this machine has one")
    found = run(CASES["ragged"], DataParallelStrategy(), accelerator="cuda", devices=2)
    assert_equal(found, baseline(CASES["ragged"]), 1e-8)
