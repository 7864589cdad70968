"""What overlaps on late devices, computed on their clock: stages, and copies of the next batch under this one."""

from typing import Any

import late_device
import pytest
import pytorch_lightning as pl
import torch
from late_device import Delays, needs_late_device
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import DDPModelParallelStrategy, DDPStrategy, ModelParallelStrategy

pytestmark = needs_late_device

LONG = Delays(0.0, 0.0, by_name=[("aten::addmm.out", 1.0), ("aten::mm.out", 1.0)])
"""Matrix products take a second, and all else no time: what the schedule can reach."""

EVEN = Delays(3e-3, 3e-3)
"""Every operation and every copy takes 3 ms."""

NUM_STEPS = 3


class Equal(pl.LightningModule):
    """Stages of equal layers; reads the clock where steps begin."""

    def __init__(self, num_stages: int, depth: int = 8) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(self._stage(depth) for _ in range(num_stages)))
        self.clock: list[tuple[float, float]] = []

    @staticmethod
    def _stage(depth: int) -> nn.Sequential:
        return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.Tanh())))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.stages(batch[0]).square().mean()

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.append((late_device.clock(), sum(map(late_device.busy_s, range(4)))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _of_ideal(num_stages: int, num_microbatches: int, schedule: Any, delays: Delays) -> float:
    """The speed-up over one device by that of a schedule without any loss, in the last step."""
    late_device.set_delays(delays)
    devices = [f"late:{stage}" for stage in range(num_stages)]
    cut = [f"stages.{stage}" for stage in range(1, num_stages)]
    strategy = ModelParallelStrategy(devices, num_microbatches=num_microbatches, schedule=schedule, partition=cut)
    module, data = Equal(num_stages), torch.randn(NUM_STEPS * 32, 4)
    quiet_trainer(strategy, 1, accelerator="late", max_epochs=1).fit(module, DataLoader(TensorDataset(data), 32))
    (since, busy), (until, then) = module.clock[-2:]
    m, k = num_microbatches, num_stages
    return (then - busy) / (until - since) / (m * k / (m + k - 1))


def _all_of_ideal(cells: list[tuple[Any, ...]]) -> list[float]:
    return [_of_ideal(*cell) for cell in cells]


FEW = [(2, 4, "1f1b", LONG), (4, 8, "1f1b", LONG), (2, 4, "gpipe", EVEN)]
MANY = [(k, m, name, LONG) for k in (2, 4) for m in (4, 8, 32) for name in ("1f1b", "gpipe")]


@pytest.mark.parametrize("cells", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_stages_overlap_as_their_schedule_says(cells: list[Any]) -> None:
    # Failed before: a copy between stages was begun after its micro-batch had given way, so that it waited for the next
    # one; and copies waited for each other. `1f1b` took as long as one stage after the other.
    reached = late_device.run(_all_of_ideal, cells)
    for cell, found in zip(cells, reached, strict=True):
        assert found >= (0.95 if cell[-1] is LONG else 0.9), (cell, reached)


def _of_ideal_under_ranks() -> float:
    late_device.set_delays(LONG)
    strategy = DDPModelParallelStrategy(num_microbatches=4, partition=["stages.1"], timeout_s=60)
    module, data = Equal(2), torch.randn(NUM_STEPS * 64, 4)
    quiet_trainer(strategy, 4, accelerator="late", max_epochs=1).fit(module, DataLoader(TensorDataset(data), 32))
    (since, busy), (until, then) = module.clock[-2:]
    return (then - busy) / (until - since) / 1.6


def test_stages_of_ranks_overlap_as_their_schedule_says() -> None:
    # Failed while the last micro-batch began its backward pass by a loss on the root device, which was at work.
    assert min(late_device.run_ranks(_of_ideal_under_ranks, 2)) >= 0.95


class Traced(Equal):
    """Keeps what the last step has queued."""

    spans: Any = ()

    def on_train_batch_start(self, *_: Any) -> None:
        late_device.extension().set_tracing(True)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.spans = late_device.extension().spans()


def _reduced() -> tuple[float, float]:
    late_device.set_delays(Delays(1e-3, 5e-3))
    strategy = DDPStrategy(timeout_s=60, bucket_cap_mb=1e-4)
    module, data = Traced(2), torch.randn(NUM_STEPS * 32, 4)
    quiet_trainer(strategy, 2, accelerator="late", max_epochs=1).fit(module, DataLoader(TensorDataset(data), 16))
    products = [end for *_, name, _, end in module.spans if name == "aten::mm.out"]
    return max(products), min(begin for *_, name, begin, _ in module.spans if name == "collective")


def test_ranks_reduce_gradients_while_others_are_computed() -> None:
    for last_product, first_sum in late_device.run_ranks(_reduced, 2):
        assert first_sum < last_product
