"""Bytes kept for backward, against counts by hand."""

import torch
from torch import nn

from evener.strategies.pipeline._activation_memory import profile_activations
from evener.strategies.pipeline.module_parts import find_parts


def test_bytes_by_hand() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2, bias=False), nn.Dropout(0.5))
    batch = torch.randn(3, 4, requires_grad=True)
    before = torch.get_rng_state()
    kept = profile_activations(module, find_parts(module), (batch,))
    # part 0 keeps its input (3·4 floats) and the sigmoid its output (3·8), which part 2 keeps too;
    # dropout, after part 2, keeps its mask, of floats on the CPU
    assert kept == {"0": 4 * (3 * 4 + 3 * 8), "2": 4 * 3 * 2}
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_batch_statistics_are_not_touched() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    profile_activations(module, find_parts(module), (torch.randn(5, 4),))
    assert int(module[1].num_batches_tracked) == 0
    assert torch.equal(module[1].running_mean, torch.zeros(4))
