"""Bugs that were found and fixed, each with its cause."""

import signal

import torch
from torch.distributed.elastic.multiprocessing import api

from evener.strategies.reduction import ChunkLosses
from evener.trainer.launch import signal_handlers_kept


def test_a_batch_in_which_nothing_weighs_anything_has_a_loss() -> None:
    # The weights were divided by their sum: a rank whose micro-batches held only padding got 0/0, and NaN weights.
    losses = [torch.tensor(2.0), torch.tensor(4.0)]
    zeros = [torch.tensor(0.0), torch.tensor(0.0)]
    assert float(ChunkLosses(losses, list(zeros)).combine(torch.device("cpu"))) == 3.0
    assert float(ChunkLosses(losses, [0.0, 0.0]).combine(torch.device("cpu"))) == 3.0
    assert float(ChunkLosses(losses, [torch.tensor(0.0), torch.tensor(5.0)]).combine(torch.device("cpu"))) == 4.0


def test_signal_handlers_are_this_processs_own_after_a_launch() -> None:
    # torch's agent installed handlers that raise, and left them: SIGTERM in the same process later was an exception.
    before = signal.getsignal(signal.SIGTERM)
    with signal_handlers_kept():
        signal.signal(signal.SIGTERM, api._terminate_process_handler)
    assert signal.getsignal(signal.SIGTERM) is before
