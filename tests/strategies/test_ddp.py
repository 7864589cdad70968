"""DDP trains as one device does: weights, metrics, predictions, whatever the number of ranks."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from distributed import run_ranks
from pytorch_lightning.callbacks import ModelPruning
from regression import (
    NUM_SAMPLES,
    Net,
    Numbered,
    assert_as_single,
    fit,
    fit_all,
    outcome,
    quiet_trainer,
    trainer_of,
    weights,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from evener.strategies import DDPStrategy, SingleDeviceStrategy

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "clipped": {"trainer": {"gradient_clip_val": 0.1}},
    "weighted": {"weighted": True},
}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ddp_trains_as_one_device_does(num_ranks: int) -> None:
    by_rank = run_ranks(fit_all, num_ranks, DDPStrategy, CASES, 6, num_ranks, timeout_s=300)
    for (name, batch_size_is), first in by_rank[0].items():
        single = outcome(*fit(SingleDeviceStrategy(), 1, 6, CASES[name]))
        ranks = [outcomes[name, batch_size_is] for outcomes in by_rank]
        for rank in ranks:
            torch.testing.assert_close(rank["weights"], single["weights"], rtol=0, atol=1e-10)
        assert first["metrics"] == pytest.approx(single["metrics"], abs=1e-12), name
        steps = [sorted(chain(*parts)) for parts in zip(*(rank["trained"] for rank in ranks), strict=True)]
        assert steps == [sorted(batch) for batch in single["trained"]], name
        for rank in ranks:  # lists that evaluation steps extend are gathered to every rank
            assert sorted(rank["validated"]) == sorted(2 * list(range(NUM_SAMPLES))), name


class Uneven(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Rank 0 has 5 batches of 2, rank 1 has 3: samples 0..9 and 10..15."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        data = Numbered()
        yield from (data[i] for i in (range(10) if torch.distributed.get_rank() == 0 else range(10, 16)))


class Keys(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Whole batches by key: of 3, 1 and 2 samples."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = [slice(0, 3), slice(3, 4), slice(4, 6)][index]
        data = Numbered()
        return data.x[rows], data.y[rows], torch.arange(rows.start, rows.stop)


class Counting(Net):
    """With a buffer and a metric, which a step that does not count must not change."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append(batch[2].tolist())
        self.mean.update(batch[2])
        self.log("largest", batch[2].max().double(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("batches", 1.0, reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.total += batch[0].sum(0)
        return self.net(batch[0]).square().mean()


def _odd_loaders() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, loader in (("uneven", DataLoader(Uneven(), 2)), ("keys", DataLoader(Keys(), batch_size=None))):
        module = Net()
        trainer = quiet_trainer(DDPStrategy(timeout_s=120), 2, max_epochs=1)
        trainer.fit(module, loader)
        found[name] = outcome(module, trainer)
    counting = Counting()
    strategy = DDPStrategy(timeout_s=120, verify=False)  # each rank sums up its own samples
    trainer = quiet_trainer(strategy, 2, max_epochs=1)
    trainer.fit(counting, DataLoader(Numbered(9), 4))  # global batches of 8 and 1: rank 1 has nothing in the last
    found["counting"] = [counting.total, counting.mean.compute(), counting.trained]
    found["counted"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return found


def _trained_alone(batches: list[list[int]]) -> Tensor:
    module = Net()
    trainer_of("single", max_epochs=1).fit(module, DataLoader(Numbered(), batch_sampler=batches))
    return weights(module)


def test_loaders_of_every_kind_finish_and_stay_exact() -> None:
    by_rank = run_ranks(_odd_loaders, 2)
    first, second = by_rank
    uneven = _trained_alone([[0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15], [6, 7], [8, 9]])
    keyed = _trained_alone([[0, 1, 2, 3], [4, 5]])
    for rank in by_rank:
        torch.testing.assert_close(rank["uneven"]["weights"], uneven, rtol=0, atol=1e-10)
        torch.testing.assert_close(rank["keys"]["weights"], keyed, rtol=0, atol=1e-10)
    assert (len(first["uneven"]["trained"]), len(second["uneven"]["trained"])) == (5, 3)  # two steps had weight zero

    total, metric, trained = second["counting"]
    assert trained == [[4, 5, 6, 7]]  # of the step without samples nothing is left
    torch.testing.assert_close(total, Numbered(9).x[4:8].sum(0))
    assert metric == 4  # the mean of 0..8, over both ranks
    assert second["counted"]["largest"] == 8
    assert second["counted"]["batches"] == 3  # two of rank 0, one of rank 1


def _evaluate(strategy: str, num: int, batch_size_is: Any) -> tuple[Tensor | None, float]:
    made = SingleDeviceStrategy() if strategy == "single" else DDPStrategy(batch_size_is=batch_size_is, timeout_s=120)
    trainer = quiet_trainer(made, 1 if strategy == "single" else 2)
    (validated,) = trainer.validate(Net(), DataLoader(Numbered(num), 4), verbose=False)
    predicted: Any = trainer.predict(Net(), DataLoader(Numbered(num), 4))
    if batch_size_is == "per_device" and trainer.is_global_zero:
        assert [len(part) for part in predicted] == [min(4, num - start) for start in range(0, num, 4)]
    return torch.cat(predicted) if trainer.is_global_zero else None, validated["val"]


@pytest.mark.parametrize("batch_size_is", ["per_device", "global"])
@pytest.mark.parametrize("num", [21, 1])
def test_evaluations_are_one_devices_and_rank_0_has_all_predictions(num: int, batch_size_is: str) -> None:
    predicted, value = _evaluate("single", num, batch_size_is)
    first, second = run_ranks(_evaluate, 2, "ddp", num, batch_size_is)
    torch.testing.assert_close(first[0], predicted, rtol=0, atol=1e-12)
    assert (first[1], second[1]) == pytest.approx((value, value), abs=1e-12)  # was rounded on a rank without samples


def _prune(strategy: str) -> tuple[Tensor, Tensor]:
    module = Net()
    layers: Any = [(module.net[0], "weight"), (module.net[2], "weight")]
    pruning: Any = ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.2)
    trainer = trainer_of(strategy, max_epochs=6, num_sanity_val_steps=0, callbacks=[pruning])
    trainer.fit(module, DataLoader(Numbered(9), 4), DataLoader(Numbered(1), 4))
    return module.net[0].weight.detach(), module.net[2].weight.detach()  # type: ignore[return-value]


def test_a_rank_without_samples_to_validate_prunes_the_same_weights() -> None:
    """Cause: torch's pruning sets the weight in a hook before forward, which this rank had not run since the step."""
    pruned, _ = assert_as_single(_prune, "ddp")
    assert 0 < int((pruned == 0).sum()) < pruned.numel()


class Modes(Net):
    """Notes in which mode it evaluates, exchanges its outputs within a step, and keeps them in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[bool, bool, list[float]]] = []
        self.mean = MeanMetric()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(self.predict_step(batch, batch_idx))
        self.log("mean", self.mean)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        own = outputs.sum()
        torch.distributed.all_reduce(own)  # in place
        gathered: Any = self.all_gather(outputs)
        sums = [float(own), float(gathered.sum())]
        self.found.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), sums))
        return outputs


def _evaluate_in_modes() -> list[Any]:
    found: list[Any] = []
    loader = DataLoader(Numbered(8), 4)
    for inference_mode in (True, False):
        module = Modes()
        options: Any = {"inference_mode": inference_mode, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(DDPStrategy(timeout_s=60), 2, **options)
        trainer.test(module, loader, verbose=False)
        trainer.predict(module, loader)
        trainer.fit(module, loader, loader)  # after which nothing of the evaluation is left
        found.append(module.found)
    return found


def test_ranks_evaluate_in_inference_mode_as_one_device_does() -> None:
    """Cause: Lightning only turns gradients off under gloo, though torch 2.13's gloo takes inference tensors; each step
    cost a tenth more than on one device."""
    inputs = torch.stack([x for x, _, _ in Numbered(8)])
    sums = pytest.approx([Net().net(inputs).sum().item()] * 2)
    for found in run_ranks(_evaluate_in_modes, 2):
        # a rank has one batch of each pass
        assert found == [[(True, False, sums)] * 2, [(False, False, sums)] * 2]
