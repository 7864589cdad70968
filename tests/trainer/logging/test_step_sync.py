"""Values logged by step with `sync_dist=True` are means over the ranks, exchanged once per step for all keys.

Values that the hook of an epoch computes from what steps collected, which differ by rank, are warned of.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer
from tiny import Tiny, quiet
from torch import Tensor
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy, SingleDeviceStrategy


class Logs(Tiny):
    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.exchanges: list[int] = []
        self.seen: list[dict[str, float]] = []
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = torch.tensor(float(10 * self.global_rank + batch_idx))
        self.log("mean", value, sync_dist=True)
        self.log("largest", value, sync_dist=True, reduce_fx="max", on_step=True, on_epoch=True)
        self.log("number", 10.0 * self.global_rank + batch_idx, sync_dist=True)
        self.log("both", value, sync_dist=True, on_step=True, on_epoch=True, batch_size=1)
        return (self.w * batch).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({key: value.item() for key, value in self.trainer.callback_metrics.items()})
        self.exchanges.append(self.count)
        self.count = 0


def _fit() -> dict[str, Any]:
    warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
    module = Logs()

    def counted(exchange: Any, *args: Any, **kwargs: Any) -> Any:
        module.count += not kwargs.get("async_op")  # the strategy's own, about ragged ends, do not wait
        return exchange(*args, **kwargs)

    for name in ("all_reduce", "gather"):  # a gather is followed by a broadcast; DDP's own reducer is not Python
        setattr(torch.distributed, name, partial(counted, getattr(torch.distributed, name)))
    trainer = quiet(strategy=DDPStrategy(), devices=2)
    batches: Any = [torch.tensor([float(i)]) for i in range(8)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    final = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return {"seen": module.seen, "exchanges": module.exchanges, "final": final}


def test_ranks_see_the_reduced_values_after_one_exchange_per_step() -> None:
    for rank in run_ranks(_fit, 2, timeout_s=300):
        # step i: rank 0 logs i and rank 1 logs 10 + i
        for index, seen in enumerate(rank["seen"]):
            assert (seen["mean"], seen["number"], seen["both_step"]) == (index + 5, index + 5, index + 5)
            assert seen["largest_step"] == index + 10
        steps = len(rank["seen"])
        assert steps > 2
        assert rank["exchanges"][1:] == [1] * (steps - 1)  # whatever the number of keys and their operations
        assert rank["final"]["both_epoch"] == (steps - 1) / 2 + 5
        assert rank["final"]["largest_epoch"] == steps - 1 + 10


class Monitored(Tiny):
    """A scheduler decides by a step value that is logged without `sync_dist`: batch i has the values i and -i."""

    def __init__(self, interval: str, monitor: str) -> None:
        super().__init__()
        self.interval, self.monitor = interval, monitor
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("value", batch.mean(), on_step=True, on_epoch=self.monitor != "value")
        return super().training_step(batch[:, None], batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": scheduler, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}


def _fit_monitored(interval: str, monitor: str) -> list[float]:
    warnings.simplefilter("ignore")
    trainer = quiet(strategy=DDPStrategy(batch_size_is="global", timeout_s=120), devices=2, max_epochs=3)
    module = Monitored(interval, monitor)
    # rank 0 has the first sample of each batch, whose values rise, and rank 1 the second, whose values fall
    batches: Any = torch.tensor([float(sign * i) for i in range(3) for sign in (1, -1)])
    trainer.fit(module, DataLoader(batches, batch_size=2))
    return module.rates


@pytest.mark.parametrize(
    ("interval", "monitor", "rates"),
    [
        # the mean of each batch is 0: the first is the best, and every further one halves the rate
        ("step", "value", [0.5 ** max(0, i - 1) for i in range(9)]),
        ("step", "value_step", [0.5 ** max(0, i - 1) for i in range(9)]),
        ("epoch", "value_step", [1.0] * 6 + [0.5] * 3),
    ],
)
def test_ranks_decide_by_one_value_of_a_step(interval: str, monitor: str, rates: list[float]) -> None:
    for rank in run_ranks(_fit_monitored, 2, interval, monitor):
        assert rank == rates


class Collects(Net):
    """Collects errors in lists, the idiom of Lightning 2; what evaluation collects is joined: tests/acceptance."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        error = (self.net(batch[0]) - batch[1]).square()
        self.errors += error.detach()
        return error.mean()

    def on_train_epoch_end(self) -> None:
        mean = torch.cat(self.errors).mean()
        self.log("own", mean)
        self.log("by size", mean, sync_dist=True, batch_size=len(self.errors))
        self.log("epoch", float(self.current_epoch))  # the same on all ranks: nothing to say
        self.errors.clear()


def _fit_collecting(num_ranks: int) -> tuple[float, list[str]]:
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    trainer = quiet_trainer(strategy, num_ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Collects(), DataLoader(Numbered(9), 4))
    told = [str(warning.message) for warning in caught if "is another one on each rank" in str(warning.message)]
    return float(trainer.callback_metrics["by size"]), told


def test_a_value_that_differs_by_rank_is_warned_of_once_and_with_its_number_of_samples_it_is_one_devices() -> None:
    single, _ = _fit_collecting(1)
    (first, told), (second, others) = run_ranks(_fit_collecting, 2, 2)
    assert [first, second] == pytest.approx([single] * 2, abs=1e-10)
    assert [message.partition(":")[0] for message in told] == ["self.log('own') in on_train_epoch_end"]
    assert others == []  # only rank 0 speaks
