"""What travels from the root to replicas."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import Case, TiedNet, fit, make_module
from torch import Tensor

from evener.strategies import DataParallelStrategy
from evener.strategies.replicas import replicas as replicas_room


class Frozen(TiedNet):
    """With a frozen layer, which is written to in the ways of `write` after the fourth step."""

    write = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
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


@pytest.mark.parametrize(
    ("write", "expected"),
    [("", []), ("torch", [5]), ("data", [5]), ("data is set", [5]), ("view", [1, 2, 3, 4, 5, 6, 7, 8, 9])],
)
def test_frozen_parameters_travel_only_after_a_write(
    write: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Frozen, num=40)
    module: Any = make_module(case)
    module.write = write
    frozen = {id(parameter) for parameter in module.frozen.parameters()}
    sent: dict[int, int] = {}
    copy = replicas_room.broadcast_coalesced

    def counted(sources: Sequence[Tensor], targets: Any) -> None:
        sent[module.global_step] = sum(source.nbytes for source in sources if id(source) in frozen)
        copy(sources, targets)

    monkeypatch.setattr(replicas_room, "broadcast_coalesced", counted)
    fit(case, module, DataParallelStrategy(), max_epochs=1, limit_val_batches=0)
    assert sent.pop(0) > 0  # hooks before the first step may write to everything
    assert list(sent) == list(range(1, 10))
    assert [step for step, num_bytes in sent.items() if num_bytes] == expected
