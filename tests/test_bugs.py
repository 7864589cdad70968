"""Bugs that were found and fixed, each with its cause."""

import torch

from evener.strategies.reduction import ChunkLosses


def test_a_batch_in_which_nothing_weighs_anything_has_a_loss() -> None:
    # The weights were divided by their sum: a rank whose micro-batches held only padding got 0/0, and NaN weights.
    losses = [torch.tensor(2.0), torch.tensor(4.0)]
    zeros = [torch.tensor(0.0), torch.tensor(0.0)]
    assert float(ChunkLosses(losses, list(zeros)).combine(torch.device("cpu"))) == 3.0
    assert float(ChunkLosses(losses, [0.0, 0.0]).combine(torch.device("cpu"))) == 3.0
    assert float(ChunkLosses(losses, [torch.tensor(0.0), torch.tensor(5.0)]).combine(torch.device("cpu"))) == 4.0
