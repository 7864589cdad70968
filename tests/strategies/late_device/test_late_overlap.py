"""What overlaps on late devices, computed on their clock: stages, and copies of the next batch under this one."""

from functools import partial
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


class Equal(pl.LightningModule):
    """Stages of equal layers; reads the clock where steps begin, and keeps what the last one has queued."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        layers = [[layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())] for _ in range(num_stages)]
        self.stages = nn.Sequential(*(nn.Sequential(*stage) for stage in layers))
        self.clock: list[tuple[float, float]] = []
        self.spans: Any = ()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.stages(batch[0]).square().mean()

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.append((late_device.clock(), sum(map(late_device.busy_s, range(4)))))
        late_device.extension().set_tracing(True)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.spans = late_device.extension().spans()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fitted(strategy: Any, num_devices: int, num_stages: int, size: int, delays: Delays) -> Equal:
    """Three steps."""
    late_device.set_delays(delays)
    module, data = Equal(num_stages), TensorDataset(torch.randn(96, 4))
    quiet_trainer(strategy, num_devices, accelerator="late", max_epochs=1).fit(module, DataLoader(data, size))
    return module


def _of_ideal(module: Equal, num_microbatches: int) -> float:
    """The speed-up over one device by that of a schedule without any loss, in the last step."""
    (since, busy), (until, then) = module.clock[-2:]
    m, k = num_microbatches, len(module.stages)
    return (then - busy) / (until - since) / (m * k / (m + k - 1))


def _all_of_ideal(cells: list[tuple[Any, ...]]) -> list[float]:
    found = []
    for num_stages, num, schedule, delays in cells:
        devices, cut = zip(*((f"late:{stage}", f"stages.{stage}") for stage in range(num_stages)), strict=True)
        strategy = ModelParallelStrategy(devices, num_microbatches=num, schedule=schedule, partition=cut[1:])
        found.append(_of_ideal(_fitted(strategy, 1, num_stages, 32, delays), num))
    return found


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
    strategy = DDPModelParallelStrategy(num_microbatches=4, partition=["stages.1"], timeout_s=60)
    return _of_ideal(_fitted(strategy, 4, 2, 16, LONG), 4)


def test_stages_of_ranks_overlap_as_their_schedule_says() -> None:
    # Failed while the last micro-batch began its backward pass by a loss on the root device, which was at work.
    assert min(late_device.run_ranks(_of_ideal_under_ranks, 2)) >= 0.95


STAGES = partial(DDPModelParallelStrategy, num_microbatches=3)
REDUCING: dict[str, tuple[Any, int]] = {
    "ddp": (DDPStrategy, 2),
    "1f1b": (STAGES, 4),
    "gpipe": (partial(STAGES, schedule="gpipe"), 4),
    "find_unused_parameters": (partial(STAGES, find_unused_parameters=True), 4),
}


def _reduced(names: list[str]) -> list[tuple[float, float, int]]:
    """The ends of the last product, and the begin of the first sum over ranks, and how many there are of these."""
    found = []
    for strategy, num_devices in (REDUCING[name] for name in names):
        made = strategy(timeout_s=60, bucket_cap_mb=1e-6)  # of one parameter each
        spans = _fitted(made, num_devices, 2, 16, Delays(1e-3, 5e-3)).spans
        products = [end for *_, name, _, end in spans if name == "aten::mm.out"]
        sums = [begin for *_, name, begin, _ in spans if name == "collective"]
        found.append((max(products), min(sums), len(sums)))
    return found


def test_ranks_reduce_gradients_while_others_are_computed_each_once() -> None:
    for rank in late_device.run_ranks(_reduced, 2, list(REDUCING)):
        for name, (last_product, first_sum, num_sums) in zip(REDUCING, rank, strict=True):
            assert first_sum < last_product, name
            assert num_sums == 32 + (name == "find_unused_parameters"), name  # and which ones were used
