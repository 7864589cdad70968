"""What travels from the root to replicas."""

from typing import Any

import pytest
import torch
from parity import Case, TiedNet, assert_equal, baseline, run

from evener.strategies import DataParallelStrategy


class Frozen(TiedNet):
    """With a frozen layer, which is written to in the ways of `write` after the fourth step."""

    write = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 4 and self.write == "data":
            self.frozen.weight.data.mul_(0.5)
        elif batch_idx == 4 and self.write == "data is set":
            self.frozen.weight.data = self.frozen.weight.data * 0.5
        elif batch_idx == 4 and self.write == "torch":
            with torch.no_grad():
                self.frozen.weight.mul_(0.5)
        elif batch_idx == 4 and self.write == "view":
            self.view.mul_(0.5)

    def on_train_start(self) -> None:
        if self.write == "view":
            self.view = self.frozen.weight.data


@pytest.mark.parametrize("write", ["", "torch", "data", "data is set", "view"])
def test_replicas_follow_a_frozen_layer_whoever_writes_to_it(write: str) -> None:
    def made() -> Any:
        module: Any = Frozen()
        module.write = write
        return module

    case = Case(made, num=40)
    assert_equal(run(case, DataParallelStrategy(), devices=3), baseline(case), 1e-10)
