"""Numbers that a training step appends to a list of the module are one per batch, or refused."""

from collections import deque
from typing import Any

import pytest
import torch
from parity import Case, Net, assert_equal, baseline, run
from torch import Tensor

from evener.strategies import DataParallelStrategy, ModelParallelStrategy
from evener.strategies.core.errors import ConfigError


class Recent(Net):
    """Subtracts the mean of its recent losses, which it collects in a list or a deque."""

    recent: Any

    def __init__(self) -> None:
        super().__init__()
        self.recent = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scale = 1.0 + sum(self.recent[-2:]) if isinstance(self.recent, list) else 1.0
        self.recent.append(loss.item())
        return scale * loss


class RecentInDeque(Recent):
    """The same in a deque of the last five."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = deque(maxlen=5)


def _strategy(name: str, **options: Any) -> Any:
    if name == "dp":
        return DataParallelStrategy(**options)
    return ModelParallelStrategy(num_microbatches=2, **options)


@pytest.mark.parametrize("kind", [Recent, RecentInDeque])
@pytest.mark.parametrize("name", ["dp", "model_parallel"])
def test_numbers_collected_by_parts_of_a_batch_are_refused(name: str, kind: Any) -> None:
    # micro-batches appended one each, without a word; so did replicas to a deque
    with pytest.raises(ConfigError, match=rf"training_step appended 2 values to {kind.__name__}\.recent.*batch_dims"):
        run(Case(kind), _strategy(name), devices=2)


class Told(Net):
    """Logs the mean of its batches' losses, which it collects in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[Tensor] = deque()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.recent.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(list(self.recent)).mean())
        self.recent.clear()


@pytest.mark.parametrize("name", ["dp", "model_parallel"])
def test_collected_means_are_those_of_batches(name: str) -> None:
    strategy = _strategy(name, batch_dims={"training_step.recent": "mean"})
    assert_equal(run(Case(Told), strategy, devices=2), baseline(Case(Told)), 1e-10)
