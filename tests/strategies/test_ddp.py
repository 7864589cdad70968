"""DDP trains as one device does: weights, metrics, predictions, whatever the number of ranks."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from distributed import run_ranks
from pytorch_lightning.callbacks import ModelPruning
from regression import NUM_SAMPLES, Net, Numbered, fit, fit_all, outcome, quiet_trainer
from torch import Tensor, nn
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


def _odd_loaders(num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    module = Net()
    trainer = quiet_trainer(DDPStrategy(timeout_s=120), num_ranks, max_epochs=1)
    trainer.fit(module, DataLoader(Uneven(), 2))
    found["uneven"] = outcome(module, trainer)
    module = Net()
    trainer = quiet_trainer(DDPStrategy(timeout_s=120), num_ranks, max_epochs=1)
    trainer.fit(module, DataLoader(Keys(), batch_size=None))
    found["keys"] = outcome(module, trainer)
    counting = Counting()
    strategy = DDPStrategy(timeout_s=120, verify=False)  # each rank sums up its own samples
    trainer = quiet_trainer(strategy, num_ranks, max_epochs=1)
    trainer.fit(counting, DataLoader(Numbered(9), 4))  # global batches of 8 and 1: rank 1 has nothing in the last
    found["counting"] = [counting.total, counting.mean.compute(), counting.trained]
    found["counted"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
    for num in (21, 1):
        for batch_size_is in ("per_device", "global"):
            trainer = quiet_trainer(DDPStrategy(batch_size_is=batch_size_is, timeout_s=120), num_ranks)
            found["predict", num, batch_size_is] = trainer.predict(Net(), DataLoader(Numbered(num), 4))
    trainer.validate(Net(), DataLoader(Numbered(21), 4), verbose=False)
    found["validate"] = trainer.callback_metrics["val"].item()
    return found


def test_loaders_of_every_kind_finish_and_stay_exact() -> None:
    by_rank = run_ranks(_odd_loaders, 2, 2, timeout_s=300)
    first, second = by_rank
    data = Numbered()

    def trained_alone(batches: list[list[int]]) -> Tensor:
        module = Net()
        optimizer = module.configure_optimizers()
        for rows in batches:
            optimizer.zero_grad()
            (module.net(data.x[rows]) - data.y[rows]).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    steps = [[0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15], [6, 7], [8, 9]]
    for rank in by_rank:
        torch.testing.assert_close(rank["uneven"]["weights"], trained_alone(steps), rtol=0, atol=1e-10)
        keyed = trained_alone([[0, 1, 2, 3], [4, 5]])
        torch.testing.assert_close(rank["keys"]["weights"], keyed, rtol=0, atol=1e-10)
    assert (len(first["uneven"]["trained"]), len(second["uneven"]["trained"])) == (5, 3)  # two steps had weight zero

    total, metric, trained = second["counting"]
    assert trained == [[4, 5, 6, 7]]  # of the step without samples nothing is left
    torch.testing.assert_close(total, Numbered(9).x[4:8].sum(0))
    assert metric == 4  # the mean of 0..8, over both ranks
    assert second["counted"]["largest"] == 8
    assert second["counted"]["batches"] == 3  # two of rank 0, one of rank 1

    for num in (21, 1):
        single = quiet_trainer(SingleDeviceStrategy()).predict(Net(), DataLoader(Numbered(num), 4))
        for batch_size_is in ("per_device", "global"):
            predictions = first["predict", num, batch_size_is]
            expected = torch.cat(single or [])  # type: ignore[arg-type]  # of batches of other sizes: the last bits differ
            torch.testing.assert_close(torch.cat(predictions), expected, rtol=0, atol=1e-12)
            if batch_size_is == "per_device":
                assert [len(part) for part in predictions] == [len(part) for part in single or []]
    single = quiet_trainer(SingleDeviceStrategy())
    single.validate(Net(), DataLoader(Numbered(21), 4), verbose=False)
    for rank in by_rank:
        assert rank["validate"] == pytest.approx(single.callback_metrics["val"].item(), abs=1e-12)


def _prune(strategy: Any, devices: int) -> tuple[Tensor, Tensor]:
    module = Net()
    layers: Any = [(module.net[0], "weight"), (module.net[2], "weight")]
    pruning: Any = ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.2)
    trainer = quiet_trainer(strategy, devices, max_epochs=6, num_sanity_val_steps=0, callbacks=[pruning])
    trainer.fit(module, DataLoader(Numbered(9), 4), DataLoader(Numbered(1), 4))
    return module.net[0].weight.detach(), module.net[2].weight.detach()  # type: ignore[return-value]


def test_a_rank_without_samples_to_validate_prunes_the_same_weights() -> None:
    """Cause: torch's pruning sets the weight in a hook before forward, which this rank had not run since the step."""
    expected = _prune(SingleDeviceStrategy(), 1)
    assert 0 < int((expected[0] == 0).sum()) < expected[0].numel()
    for found in run_ranks(_prune, 2, DDPStrategy(batch_size_is="global", timeout_s=60), 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Edits(Net):
    """Scales its accumulated gradients down by their norm; logs in another dtype than its own."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad /= 1 + parameter.grad.norm()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.net(batch[0]) - batch[1]).square().mean().float(), on_step=True, sync_dist=True)


class Hooked(Net):
    """Steps by its forward, whose hook doubles the output: once, as on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: 2 * output)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


class ByHand(Net):
    """Steps its optimizer after every second batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def _fit_edits(ranks: int) -> list[Any]:
    found: list[Any] = []
    accumulated: Any = {"accumulate_grad_batches": 2}
    for kind, options in (
        (Edits, accumulated),
        (Edits, {**accumulated, "exact_accumulation": True}),
        (Hooked, {}),
        (ByHand, {}),
    ):
        strategy = DDPStrategy(batch_size_is="global", timeout_s=60) if ranks > 1 else SingleDeviceStrategy()
        module: Any = kind()
        trainer = quiet_trainer(strategy, ranks, num_sanity_val_steps=0, **options)
        trainer.fit(module, DataLoader(Numbered(13), 4), DataLoader(Numbered(5), 4))  # the last batch has one sample
        logged = {name: (value.dtype, round(float(value), 5)) for name, value in trainer.logged_metrics.items()}
        found.append((nn.utils.parameters_to_vector(module.parameters()).detach(), logged))
    return found


def test_gradients_may_be_edited_while_they_accumulate() -> None:
    """Causes: `on_after_backward` saw this rank's gradients until the last batch; with exact accumulation those of all
    ranks divided by their number; a rank without samples ended a step by hand in an error; what was logged by step
    in evaluation was float64."""
    expected = _fit_edits(1)
    for rank, found in enumerate(run_ranks(_fit_edits, 2, 2)):
        for (weights, logged), (expected_weights, expected_logged) in zip(found, expected, strict=True):
            torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-10)
            assert rank or logged == expected_logged


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
    for inference_mode in (True, False):
        module = Modes()
        options: Any = {"inference_mode": inference_mode, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(DDPStrategy(timeout_s=60), 2, **options)
        loader = DataLoader(Numbered(8), 4)
        trainer.test(module, loader, verbose=False)
        trainer.predict(module, loader)
        trainer.fit(module, loader, loader)  # after which nothing of the evaluation is left
        found.append(module.found)
    return found


def test_ranks_evaluate_in_inference_mode_as_one_device_does() -> None:
    """Cause: Lightning only turns gradients off under gloo, though torch 2.13's gloo takes inference tensors; each step
    cost a tenth more than on one device."""
    inputs = torch.stack([x for x, _, _ in Numbered(8)])
    total = Net().net(inputs).sum().item()
    for found in run_ranks(_evaluate_in_modes, 2):
        for inference_mode, steps in zip((True, False), found, strict=True):
            assert len(steps) == 2  # a rank has one batch of each pass
            for in_inference, with_gradients, sums in steps:
                assert (in_inference, with_gradients) == (inference_mode, False)
                assert sums == pytest.approx([total, total])
