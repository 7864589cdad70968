"""Step values of torchmetrics metrics under ranks are those of the global batch, on the ranks that ask for it."""

from typing import Any

import pytest
import torch
import torchmetrics
from distributed import run_ranks, run_ranks_unchecked
from regression import Net, Numbered, Points, quiet_trainer
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.wrappers import Running

from evener.strategies import BalancedDDPStrategy, DDPStrategy, SingleDeviceStrategy


class Spread(torchmetrics.Metric):
    """The difference between the largest and the smallest value; its state is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: torch.Tensor) -> None:
        self.values.append(values)

    def compute(self) -> torch.Tensor:
        values = dim_zero_cat(self.values)
        return values.max() - values.min()


class Logs(Net):
    """Logs metrics whose value of a batch is no mean of its parts' values; R2Score has none for a single sample."""

    def __init__(self) -> None:
        super().__init__()
        for stage in ("train", "val"):
            setattr(self, f"{stage}_r2", torchmetrics.R2Score().set_dtype(torch.float64))
            setattr(self, f"{stage}_max", torchmetrics.MaxMetric())
            setattr(self, f"{stage}_window", Running(torchmetrics.SumMetric(), 2))
            setattr(self, f"{stage}_spread", Spread().set_dtype(torch.float64))
            root, mean = MeanSquaredError(squared=False), MeanAbsoluteError()
            setattr(self, f"{stage}_composed", root.set_dtype(torch.float64) + mean.set_dtype(torch.float64))
        self.seen: list[dict[str, float]] = []

    def _log(self, stage: str, batch: Any, **options: Any) -> None:
        x, y, index = batch
        for name, inputs in {
            "r2": (x[:, 0], y[:, 0]),
            "spread": (x[:, 0] * y[:, 0],),
            "max": (index.double(),),
            "window": (index.double(),),
            "composed": (x[:, 0], y[:, 0]),
        }.items():
            metric: Any = getattr(self, f"{stage}_{name}")
            metric(*inputs)
            self.log(f"{stage}_{name}", metric, on_step=True, on_epoch=True, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._log("train", batch, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("val", batch, sync_dist=True)


def _fit(num: int, num_ranks: int, weights: tuple[int, ...] = (1, 1)) -> Any:
    module, logger = Logs(), Points()
    strategy = BalancedDDPStrategy(weights=weights, timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    options: dict[str, Any] = {"max_epochs": 1, "logger": logger, "log_every_n_steps": 1}
    trainer = quiet_trainer(strategy, num_ranks, num_sanity_val_steps=0, **options)
    trainer.fit(module, DataLoader(Numbered(num), 4), DataLoader(Numbered(num), 4))
    return (
        module.seen,
        [values for _, values in logger.points],
        {name: float(value) for name, value in trainer.callback_metrics.items()},
    )


@pytest.mark.parametrize(("num", "weights"), [(11, (1, 1)), (10, (1, 5))])
def test_step_values_of_metrics_are_those_of_the_global_batch(num: int, weights: tuple[int, ...]) -> None:
    # 11 in batches of 4 leave rank 1 with one sample of the last batch; 10 leave rank 0 with one, or with none
    seen, logged, final = _fit(num, 1)
    assert {"train_r2_step", "train_composed_step", "train_max_step"} <= set(seen[0])
    for rank, (rank_seen, rank_logged, rank_final) in enumerate(run_ranks(_fit, 2, num, 2, weights)):
        torch.testing.assert_close(rank_seen, seen, rtol=0, atol=1e-10)
        torch.testing.assert_close(rank_final, final, rtol=0, atol=1e-10)
        if rank == 0:
            val = [values for values in rank_logged if "val_r2_step" in values]
            torch.testing.assert_close(
                val, [values for values in logged if "val_r2_step" in values], rtol=0, atol=1e-10
            )


class Uses(Logs):
    """Logs the epoch's value only, or uses what `forward` returned."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses = uses

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.train_r2(batch[0][:, 0], batch[1][:, 0])
        self.log("r2", value if self.uses else self.train_r2, on_step=self.uses, on_epoch=True)
        return Net.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def _fit_uses(uses: bool, num_ranks: int) -> float:
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    trainer = quiet_trainer(strategy, num_ranks, max_epochs=1)
    trainer.fit(Uses(uses), DataLoader(Numbered(11), 4))
    return float(trainer.callback_metrics["r2"])


def test_a_value_that_a_rank_can_not_compute_matters_only_if_it_is_used() -> None:
    single = _fit_uses(False, 1)
    assert run_ranks(_fit_uses, 2, False, 2) == pytest.approx([single, single], abs=1e-10)
    failed = run_ranks_unchecked(_fit_uses, 2, True, 2)
    message = "R2Score: the value of a part of the batch can't be computed (Needs at least two samples"
    assert message in str(failed[1])


class EachDevice(Net):
    """Logs a metric by steps, and calls one for an epoch's value only."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = Spread().set_dtype(torch.float64)
        self.error = MeanAbsoluteError()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.spread(batch[0][:, 0])
        self.log("spread", self.spread, on_step=True, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.trainer.callback_metrics["spread_step"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.error(self.net(x), y)
        self.log("error", self.error, on_step=False, on_epoch=True)


def _fit_two_devices_each(num_ranks: int) -> list[float]:
    module: Any = EachDevice()
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120, devices_per_process=2)
    trainer = quiet_trainer(strategy if num_ranks > 1 else SingleDeviceStrategy(), 2 * num_ranks - num_ranks % 2)
    (validated,) = trainer.validate(module, DataLoader(Numbered(9), 4), verbose=False)
    trainer.fit(module, DataLoader(Numbered(11), 4))
    return [*module.seen, validated["error"]]


def test_metrics_of_ranks_with_two_devices_each_are_those_of_the_global_batch() -> None:
    # of 9 samples the last batch has one, and its rank asked the other for its part of the value of the step
    expected = _fit_two_devices_each(1)
    for found in run_ranks(_fit_two_devices_each, 2, 2):
        assert found == pytest.approx(expected, abs=1e-6)  # the error is counted in float32
