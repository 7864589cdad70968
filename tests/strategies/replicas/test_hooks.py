"""Every replica has hooks of its own: those of the root's that were registered between steps, and its own."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import Case, Net, assert_equal, baseline, fit, make_module, run
from pytorch_lightning.callbacks import ModelPruning
from torch import Tensor, nn

from evener.strategies import BalancedDataParallelStrategy, ConfigError, DataParallelStrategy, SingleDeviceStrategy

STRATEGIES = [
    DataParallelStrategy,
    lambda: DataParallelStrategy(threads=True),
    lambda: BalancedDataParallelStrategy(gpu0_chunk=0),
]


class Once(Net):
    """Registers its hook in the first step; only the step's number says that it has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 0:
            self.register()
        return super().training_step(batch, batch_idx)

    def register(self) -> None:
        self.net[0].register_forward_hook(self.scale)

    def scale(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert layer is self.net[0]
        return output * 1.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam would not notice a factor


class RemovedByTheStep(Once):
    """Registers hooks in the first step, one of which has a weight learn three times as fast; removes them later."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            self.handle.remove()
            self.handles["weight"].remove()
        return super().training_step(batch, batch_idx)

    def register(self) -> None:
        self.handle = self.net[0].register_forward_hook(self.scale)
        self.handles = {"weight": self.net[0].weight.register_hook(lambda gradient: gradient * 3)}


@pytest.mark.parametrize("threads", [False, True])
def test_what_a_step_leaves_in_one_part_is_left_on_whole_batches(threads: bool) -> None:
    case = Case(RemovedByTheStep)
    assert_equal(run(case, DataParallelStrategy(threads=threads), devices=3), baseline(case), 1e-10)


def test_a_callbacks_hook_is_called_on_every_replica() -> None:
    rows: list[int] = []

    class Watching(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            module.net[0].register_forward_pre_hook(lambda layer, inputs: rows.append(len(inputs[0])))

    case = Case(num=4, trainer={"callbacks": [Watching()], "max_epochs": 1, "limit_val_batches": 0})
    fit(case, make_module(case), DataParallelStrategy(), devices=2)
    assert rows[-2:] == [2, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pruning_equals_one_device(strategy: Any) -> None:
    """`gpu0_chunk=0` pruned other weights: torch's pruning sets the layer's weight in a hook, and the root ran none."""
    found: list[Tensor] = []
    for used, devices in ((strategy(), 3), (SingleDeviceStrategy(), 1)):
        module = make_module(Case())
        layers: Any = [(module.net[0], "weight"), (module.net[2], "weight")]
        pruning = ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.3)
        fit(Case(), module, used, devices, callbacks=[pruning], max_epochs=4)
        found.append(torch.cat([layer.weight.detach().flatten() for layer, _ in layers]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)
    assert 0 < int((found[0] == 0).sum()) < found[0].numel()


def test_hooks_that_a_step_leaves_are_refused_where_batches_must_be_cut() -> None:
    case = Case(Once)
    with pytest.raises(ConfigError, match=r"training_step registers or removes hooks.*Register them in __init__"):
        fit(case, make_module(case), DataParallelStrategy(global_view=False))
