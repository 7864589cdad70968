"""Ranks train as one device does: weights, metrics, predictions, whatever the number of ranks."""

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
    assert_same,
    fit,
    fit_all,
    outcome,
    quiet_trainer,
    trainer_of,
    weights,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from evener.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "clipped": {"trainer": {"gradient_clip_val": 0.1}},
    "weighted": {"weighted": True},
}


OF_SHARDS: dict[str, dict[str, Any]] = {
    "shuffled, accumulated": {"shuffle": True, "trainer": {"accumulate_grad_batches": 2}},
    "weighted, few samples": {"weighted": True, "num": 13},
}


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "cases"), [(DDPStrategy, 2, CASES), (DDPStrategy, 3, CASES), (FSDPStrategy, 3, OF_SHARDS)]
)
def test_ranks_train_as_one_device_does(strategy: Any, num_ranks: int, cases: dict[str, dict[str, Any]]) -> None:
    by_rank = run_ranks(fit_all, num_ranks, strategy, cases, 6, num_ranks, timeout_s=300)
    for (name, batch_size_is), first in by_rank[0].items():
        single = outcome(*fit(SingleDeviceStrategy(), 1, 6, cases[name]))
        ranks = [outcomes[name, batch_size_is] for outcomes in by_rank]
        for rank in ranks:
            torch.testing.assert_close(rank["weights"], single["weights"], rtol=0, atol=1e-10)
        assert first["metrics"] == pytest.approx(single["metrics"], abs=1e-12), name
        trained = [each["trained"] for each in (single, *ranks)]
        if strategy is FSDPStrategy:  # a rank without samples has no step
            trained = [[list(chain(*batches))] for batches in trained]
        steps = [sorted(chain(*parts)) for parts in zip(*trained[1:], strict=True)]
        assert steps == [sorted(batch) for batch in trained[0]], name
        for rank in ranks:  # lists that evaluation steps extend are gathered to every rank
            assert sorted(rank["validated"]) == sorted(2 * list(range(cases[name].get("num", NUM_SAMPLES)))), name


class Uneven(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Rank 0 has 5 batches of 2, rank 1 has 3: samples 0..9 and 10..15."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        data = Numbered()
        yield from (data[i] for i in (range(10) if torch.distributed.get_rank() == 0 else range(10, 16)))


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


def _fitted(module: Net, loader: Any, **options: Any) -> dict[str, Any]:
    trainer = quiet_trainer(DDPStrategy(timeout_s=120, **options), 2, max_epochs=1)
    trainer.fit(module, loader)
    return outcome(module, trainer)


def _odd_loaders() -> dict[str, Any]:
    found = {"uneven": _fitted(Net(), DataLoader(Uneven(), 2))}
    counting = Counting()  # each rank sums up its own samples; rank 1 has nothing in the last batch
    found["counting"] = _fitted(counting, DataLoader(Numbered(9), 4), verify=False)
    return found | {"total": counting.total, "mean": counting.mean.compute()}


def test_ranks_with_unequal_batches_finish_and_stay_exact() -> None:
    by_rank = run_ranks(_odd_loaders, 2)
    first, second = by_rank
    alone, batches = Net(), [[0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15], [6, 7], [8, 9]]
    trainer_of("single", max_epochs=1).fit(alone, DataLoader(Numbered(), batch_sampler=batches))
    for rank in by_rank:
        torch.testing.assert_close(rank["uneven"]["weights"], weights(alone), rtol=0, atol=1e-10)
    assert (len(first["uneven"]["trained"]), len(second["uneven"]["trained"])) == (5, 3)  # two steps had weight zero

    assert second["counting"]["trained"] == [[4, 5, 6, 7]]  # of the step without samples nothing is left
    torch.testing.assert_close(second["total"], Numbered(9).x[4:8].sum(0))
    assert second["mean"] == 4  # of 0..8, over both ranks
    metrics = second["counting"]["metrics"]
    assert (metrics["largest"], metrics["batches"]) == (8, 3)  # two batches of rank 0, one of rank 1


def _evaluate(strategy: str) -> list[Any]:
    found = []
    for num, batch_size_is in ((21, "per_device"), (1, "per_device"), (21, "global"), (1, "global")):
        ranks: Any = DDPStrategy(batch_size_is=batch_size_is, timeout_s=120)  # type: ignore[arg-type]
        trainer = quiet_trainer(ranks, 2) if strategy == "ddp" else trainer_of(strategy)
        loader = DataLoader(Numbered(num), 4)
        (validated,) = trainer.validate(Net(), loader, verbose=False)
        predicted: Any = trainer.predict(Net(), loader)
        if batch_size_is == "per_device" and trainer.is_global_zero:
            assert [len(part) for part in predicted] == [min(4, num - start) for start in range(0, num, 4)]
        found.append((torch.cat(predicted) if trainer.is_global_zero else None, validated["val"]))
    return found


def test_evaluations_are_one_devices_and_rank_0_has_all_predictions() -> None:
    single = _evaluate("single")
    for rank, found in enumerate(run_ranks(_evaluate, 2, "ddp")):
        # the value was rounded on a rank without samples
        assert_same(found, [(None if rank else predicted, value) for predicted, value in single], 1e-12)


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
    """Exchanges its outputs within a step, and notes that in which mode it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[bool, float]] = []

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        own = self.net(batch[0]).sum()
        torch.distributed.all_reduce(own)  # in place
        self.found.append((torch.is_inference_mode_enabled(), float(own)))

    test_step = predict_step


def _evaluate_in_modes() -> list[Any]:
    found: list[Any] = []
    loader = DataLoader(Numbered(8), 4)  # a rank has one batch of each pass
    for inference_mode in (True, False):
        module = Modes()
        trainer = quiet_trainer(DDPStrategy(timeout_s=60), 2, inference_mode=inference_mode)
        trainer.test(module, loader, verbose=False)
        trainer.predict(module, loader)
        trainer.fit(module, loader, loader)  # after which nothing of the evaluation is left
        found.append(module.found)
    return found


def test_ranks_evaluate_in_inference_mode_as_one_device_does() -> None:
    """Cause: Lightning only turns gradients off under gloo, though torch 2.13's gloo takes inference tensors; each step
    cost a tenth more than on one device."""
    inputs = torch.stack([x for x, _, _ in Numbered(8)])
    total = pytest.approx(Net().net(inputs).sum().item())
    for found in run_ranks(_evaluate_in_modes, 2):
        assert found == [[(True, total)] * 2, [(False, total)] * 2]
