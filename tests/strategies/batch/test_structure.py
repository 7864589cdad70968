"""What in a batch is samples: a convention, the option `batch_dims`, and what parts of results make of the whole."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import Case, Net, make_trainer
from pytorch_lightning.utilities import CombinedLoader
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from evener.strategies import (
    BalancedDataParallelStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.strategies.core.module_log import NoValue

STRATEGIES: list[Any] = [
    lambda **options: BalancedDataParallelStrategy(weights=[1, 2], **options),
    lambda **options: ModelParallelStrategy(num_microbatches=2, **options),
]


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(module: Callable[[], Net], loader: Any, strategy: Any, devices: int = 2, **options: Any) -> Tensor:
    """Weights after two epochs of training and the losses of a validation."""
    torch.manual_seed(3)
    net = module().double()
    settings = {"limit_val_batches": 0, **options}
    make_trainer(Case(), strategy, devices=devices, **settings).fit(net, loader, loader)
    return torch.cat([*(p.detach().flatten() for p in net.parameters()), torch.tensor(net.losses).double()])


def assert_trains_alike(module: Callable[[], Net], loader: Any, strategy: Any, **options: Any) -> None:
    expected = weights_of(module, loader, SingleDeviceStrategy(), 1, **options)
    torch.testing.assert_close(weights_of(module, loader, strategy, **options), expected, rtol=0, atol=1e-10)


CLASSIFIED: Any = [(vectors(4, seed=i), torch.tensor(i % 3)) for i in range(10)]


class Stream(IterableDataset[Any]):
    """Samples, or batches ready made, of which nothing is known but themselves."""

    def __init__(self, make: Callable[[Any], Any] | None = None, size: int = 1, samples: Any = None) -> None:
        self.make, self.size, self.samples = make, size, samples or CLASSIFIED

    def __iter__(self) -> Iterator[Any]:
        if self.make is None:
            yield from self.samples
            return
        for start in range(0, len(self.samples), self.size):
            yield self.make(self.samples[start : start + self.size])


class Combined(Net):
    """Labelled and unlabelled samples, of loaders that differ."""

    def loss(self, batch: Any) -> Tensor:
        (x, y), views = batch["lab"], batch["unlab"]
        alike = (self(views[0]) - self(views[1])).square().mean() if views is not None else 0
        return nn.functional.cross_entropy(self(x), y) + alike

    def size(self, batch: Any) -> int:
        return len(batch["lab"][0])


def combined(num: int, size: int, other: int, other_size: int, mode: str) -> CombinedLoader:
    unlabelled: Any = [(vectors(4, seed=i), vectors(4, seed=20 + i)) for i in range(other)]
    loaders: Any = {"lab": DataLoader(CLASSIFIED[:num], size), "unlab": DataLoader(unlabelled, other_size)}
    return CombinedLoader(loaders, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_combined_loaders_of_unequal_batches_are_refused_by_name_or_have_whole_ones(strategy: Any) -> None:
    """A tail of 2 beside a batch of 4 ended in an error of dtypes from deep inside, after the first step."""
    loaders = partial(combined, 8, 2, 20, 5, "max_size_cycle")
    with pytest.raises(ConfigError, match=r"batch\['unlab'\]\[0\] has 5 rows in a batch of 2 samples"):
        weights_of(Combined, loaders(), strategy(global_view=False))
    assert_trains_alike(Combined, loaders(), strategy())
    assert_trains_alike(Combined, loaders(), strategy(batch_dims={"unlab": "none"}))
    # a pair of views beside a batch of 2 was cut into samples: 0.4743 became 0.4936
    assert_trains_alike(Combined, combined(8, 2, 6, 2, "max_size"), strategy())


class Nested(Net):
    """Reads `{"data": [{"x": x}, (y,)]}`, whose list is no list of samples."""

    def loss(self, batch: Any) -> Tensor:
        (first, (y,)) = batch["data"]
        return nn.functional.cross_entropy(self(first["x"]), y)

    def size(self, batch: Any) -> int:
        return len(batch["data"][1][0])


class OfStream(Nested):
    def loss(self, batch: Any) -> Tensor:
        (first, (y,)) = batch["data"]
        return (first["x"].sum(1) - y).square().mean()


def as_nested(samples: list[tuple[Tensor, Tensor]]) -> Any:
    x, y = default_collate(samples)
    return {"data": [{"x": x}, (y,)]}


def _tested(kind: Any, num: int, **options: Any) -> float:
    """The mean error over samples 1, 2, ... of a stream, whose targets are twice as large."""
    stream = Stream(None, 1, [(torch.tensor([x]), 2 * x) for x in torch.arange(1.0, 1 + num, dtype=torch.float64)])
    loader = DataLoader(stream, 3, collate_fn=as_nested)
    [found] = quiet_trainer(kind(**options), 2).test(OfStream(), loader, verbose=False)
    return found["test_loss"]


def _tested_on_ranks(kind: Any, num: int) -> float:
    return _tested(kind, num, batch_size_is="global", timeout_s=60)


@pytest.mark.parametrize(("num", "expected"), [(1, 1.0), (5, (1 + 4 + 9 + 16 + 25) / 5)])
def test_a_stream_whose_samples_are_not_known_is_evaluated(num: int, expected: float) -> None:
    """Of one sample in batches of 3, the list of two tensors was taken for two samples: an IndexError, or worse."""
    wanted = pytest.approx(expected, rel=1e-12)
    assert _tested(DataParallelStrategy, num) == wanted
    assert run_ranks(_tested_on_ranks, 2, DDPStrategy, num) == [wanted, wanted]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_few_samples_that_are_looked_at_first_decide_nothing_about_batches_of_the_loaders_size(strategy: Any) -> None:
    # Eight samples are no batch of 4; of tensors in lists that don't have as many rows the lists were cut.
    assert_trains_alike(Nested, DataLoader(CLASSIFIED[:9], 4, collate_fn=as_nested), strategy())


class OfLists(Net):
    def read(self, batch: Any) -> Any:
        return batch[0][0][0], batch[1]["y"]


class OfAnything(Net):
    def read(self, batch: Any) -> Any:
        return batch.x, batch.y


def in_lists(samples: Any) -> Any:
    x, y = default_collate(samples)
    return [[x]], {"y": y}


def anything(samples: Any) -> Any:
    x, y = default_collate(samples)
    return SimpleNamespace(x=x, y=y)


STREAMS: dict[str, tuple[type[Net], Any, int, dict[str, Any]]] = {
    # Replicas of a rank refused its part of one sample, late: nothing was known but this part.
    "with what the whole batch has shown": (OfLists, Stream(in_lists, 2), 2, {"devices_per_process": 2}),
    # it was refused: nothing to count samples by
    "not by a rank that is alone": (OfAnything, Stream(anything, 3), 1, {}),
}


def _fit_stream(name: str, is_whole: bool) -> Tensor:
    torch.manual_seed(3)
    module, stream, ranks, options = STREAMS[name]
    net: Any = module().double()
    net.size = lambda batch: 1  # logs no mean
    if is_whole:
        strategy, devices = SingleDeviceStrategy(), 1
    else:
        strategy = DDPStrategy(batch_size_is="global", timeout_s=120, **options)
        devices = ranks * options.get("devices_per_process", 1)
    quiet_trainer(strategy, devices).fit(net, DataLoader(stream, batch_size=None))
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_divided_among_ranks(name: str) -> None:
    expected = _fit_stream(name, True)
    for found in run_ranks(_fit_stream, STREAMS[name][2], name, False):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Returning(Net):
    """Returns what a test wants of its validation and prediction."""

    def __init__(self, returned: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.returned = returned
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.returned(self(batch[0]), batch[1])

    predict_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(outputs)


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    r"validation_step\['correct'\] is . and . in parts of . and . samples": lambda out, y: {"correct": int(y[0])},
    r"validation_step\['correct'\] is one number": lambda out, y: {"correct": y.sum()},
    r"validation_step\['per_class'\] has 3 rows in parts of . and . samples": lambda out, y: {"per_class": out.mean(0)},
    r"validation_step\['one'\] is True and False": lambda out, y: {"one": len(y) == 4},
    r"validation_step\['few'\] differs between parts in its keys": lambda out, y: {"few": {len(y): 1}},
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_results_that_may_be_anything_are_refused_by_name_where_they_are_read(message: str) -> None:
    """Of an integer the first chunk's was taken: 5 of 9 samples."""
    module = Returning(UNKNOWN[message]).double()
    trainer = make_trainer(Case(), DataParallelStrategy(global_view=False), devices=2)
    with pytest.raises(ConfigError, match=message):
        trainer.validate(module, DataLoader(CLASSIFIED, 6), verbose=False)


@pytest.mark.parametrize("strategy", [DataParallelStrategy, lambda: BalancedDataParallelStrategy(gpu0_chunk=0)])
@pytest.mark.parametrize("data", [CLASSIFIED, Stream()], ids=["samples", "a stream"])
def test_results_that_parts_do_not_make_are_those_of_whole_batches(data: Any, strategy: Any) -> None:
    """Labels 0 1 2 0 1 2 and 0 1 2 0. Whole numbers were refused; of the root of a mean the mean over parts was taken,
    and sorted rows were joined by parts, in silence."""

    def several(out: Tensor, y: Tensor) -> dict[str, Any]:
        root = y.double().mean().sqrt()
        return {"sum": int(y.sum()), "root": root, "sorted": y.sort().values, "pairs": torch.cat([y, -y])}

    module = Returning(several).double()
    trainer = make_trainer(Case(), strategy(), devices=3)
    trainer.validate(module, DataLoader(data, 6), verbose=False)
    assert [seen["sum"] for seen in module.seen] == [6, 3]
    assert [float(seen["root"]) for seen in module.seen] == pytest.approx([1.0, 0.75**0.5], abs=1e-12)
    assert [seen["sorted"].tolist() for seen in module.seen] == [[0, 0, 1, 1, 2, 2], [0, 0, 1, 2]]
    assert module.seen[1]["pairs"].tolist() == [0, 1, 2, 0, 0, -1, -2, 0]
    predicted = trainer.predict(module, DataLoader(data, 6))
    assert [one["sorted"].tolist() for one in predicted or []] == [[0, 0, 1, 1, 2, 2], [0, 0, 1, 2]]  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_results_are_joined_as_the_option_says() -> None:
    """Validation in batches of 6 and 4: labels 0 1 2 0 1 2 and 0 1 2 0."""
    dims = {"validation_step.correct": "sum", "validation_step.bins": "sum", "validation_step.classes": "none"}
    module = Returning(
        lambda out, y: {"correct": int((y > 0).sum()), "bins": torch.bincount(y, minlength=3), "classes": 3}
    ).double()
    trainer = make_trainer(Case(), DataParallelStrategy(batch_dims=dims), devices=2)
    trainer.validate(module, DataLoader(CLASSIFIED, 6), verbose=False)
    assert [seen["correct"] for seen in module.seen] == [4, 2]
    assert [seen["bins"].tolist() for seen in module.seen] == [[2, 2, 2], [2, 1, 1]]
    assert [seen["classes"] for seen in module.seen] == [3, 3]


class Counting(Net):
    """Returns numbers of its batch, and keeps what its hook gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = batch[1]
        return {"loss": self.loss(batch), "correct": int((y > 0).sum()), "n": len(y), "a": "same", "b": f"{len(y)}"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({key: value for key, value in outputs.items() if key != "loss" and type(value) is not NoValue})


@pytest.mark.parametrize(
    ("batch_size", "seen"),
    [
        (5, [{"correct": 3, "n": 5, "a": "same"}] * 2),
        # Of a single chunk dp left out what it leaves out of several, where model_parallel kept all.
        (9, [{"correct": 6, "n": 9, "a": "same"}, {"correct": 0, "n": 1, "a": "same", "b": "1"}]),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_integers_that_training_returns_have_no_value_unless_declared(
    strategy: Any, batch_size: int, seen: Any
) -> None:
    module = Counting().double()
    used = strategy(batch_dims={"training_step.correct": "sum"})
    fitted = make_trainer(Case(), used, devices=2, max_epochs=1, limit_val_batches=0)
    fitted.fit(module, DataLoader(CLASSIFIED, batch_size), DataLoader(CLASSIFIED, batch_size))
    assert module.seen == seen
