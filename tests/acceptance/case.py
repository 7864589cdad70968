"""A case: a LightningModule as people write it, its data, and what must become of it under every strategy."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import evener

FIELDS = ("classification", "language", "vision", "contrastive", "generative", "rl", "sequence", "graph", "tabular",
          "trainer_features")  # fmt: skip
EXPECTED = ("exact", "exception", "remedy")


@dataclass(frozen=True)
class Case:
    """A module and how it is trained.

    Attributes:
        name: of the module's class.
        field: the file it stands in.
        module: makes the module; called with torch seeded and float64 as the default type.
        data: makes the loaders to train and to validate on, or a LightningDataModule.
        expected: `exact`; `exception`, where docs/law_1.md names one (BatchNorm, random numbers drawn in the step);
            `remedy`, where the module must be changed or an option given.
        settles: whether an exception is equal once its random numbers are the same for all samples and its
            normalisations use their running statistics.
        differs: logged values, by the beginnings of their names, that docs/law_1.md excepts; all others are then equal.
        tolerance: the difference that is allowed, of the largest number.
        callbacks: makes the trainer's callbacks.
        stock: whether stock Lightning trains it, too, which shows that the case is one that people could have.
        trainer: further arguments of the trainer.
        options: further arguments of strategies, by name of the plan; in remedies alone.
    """

    name: str
    field: str
    module: Callable[[], pl.LightningModule]
    data: Callable[[], Any]
    expected: str = "exact"
    settles: bool = True
    differs: tuple[str, ...] = ()
    callbacks: Callable[[], list[pl.Callback]] = list
    stock: bool = True
    tolerance: float = 1e-9
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, dict[str, Any]] = field(default_factory=dict[str, "dict[str, Any]"])


CASES: dict[str, Case] = {}
REMEDIES: dict[str, Case] = {}
"""What becomes of a case by the remedy that a message of ours names, by the case's name."""

WHOLE = {plan: {"num_microbatches": 1} for plan in ("model_parallel", "model_parallel_in_parts", "ddp_model_parallel")}
"""The remedy of what micro-batches do not take: weights that the step writes."""


def has_remedy(name: str, plan: str) -> bool:
    """Whether a case has a remedy that changes something under a plan."""
    found = REMEDIES.get(name)
    return found is not None and (found.module is not CASES[name].module or plan in found.options)


def case(data: Callable[[], Any], expected: str = "exact", over_batch: str = "", **more: Any) -> Callable[[Any], Any]:
    """Make a module's class a case.

    Args:
        data: see `Case`.
        expected: see `Case`.
        over_batch: the method that the remedied module computes by `evener.over_batch`.
        **more: what else a `Case` has; `remedies`, options of strategies that a message names, by plan; all others are
            arguments of the trainer.
    """
    assert expected in EXPECTED, expected
    remedies = more.pop("remedies", None)
    own = {name: more.pop(name) for name in ("settles", "differs", "callbacks", "stock") if name in more}

    def add(module: Any) -> Any:
        assert module.__name__ not in CASES, module.__name__
        room = module.__module__.rpartition(".")[2]
        made = Case(module.__name__, room, module, data, expected, trainer=more, **own)
        CASES[module.__name__] = made
        if remedies:
            REMEDIES[module.__name__] = replace(made, options=remedies)
        if over_batch:
            method = getattr(module, over_batch)
            whole = {over_batch: lambda self, *args: evener.over_batch(method.__get__(self))(*args)}
            REMEDIES[module.__name__] = replace(made, module=type(f"{module.__name__}OverBatch", (module,), whole))
        return module

    return add


def remedy(data: Callable[[], Any] | None = None, **options: dict[str, Any]) -> Callable[[Any], Any]:
    """Make a class the remedied one of the case whose subclass it is; `options` of strategies, by plan."""

    def add(module: Any) -> Any:
        untouched = CASES[module.__base__.__name__]
        REMEDIES[untouched.name] = replace(untouched, module=module, data=data or untouched.data, options=options)
        return module

    return add


def all_cases() -> dict[str, Case]:
    """The corpus, by name."""
    for room in FIELDS:
        importlib.import_module(f"{__package__}.{room}")
    return CASES


class Lit(pl.LightningModule):
    """The base class that many repositories write for themselves: one step for training and validation."""

    lr = 1e-2
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    """SGD for losses that no shift of all embeddings changes: Adam makes whole steps of the rounding errors of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        """Make the layers of a module, beside those of its base."""

    def step(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.step(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


class Staged(Lit):
    """The other base class: one step that is told its stage, and logs by itself."""

    def shared_step(self, batch: Any, stage: str) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.shared_step(batch, "val")


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with activations in between."""
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    return nn.Sequential(*layers[:-1])


class Net(Lit):
    """A small network, and cross-entropy unless a module has another loss."""

    lr = 5e-2
    sizes = (6, 8, 3)

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net = mlp(*self.sizes)
        self.criterion: Callable[..., Tensor] = nn.CrossEntropyLoss()
        self.build()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return self.criterion(out, y)

    def step(self, batch: Any) -> Tensor:
        return self.loss(self(batch[0]), batch[1])


class ByHand(Lit):
    """The base class of modules with several optimizers, which step by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def update(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


NUM_TRAIN, NUM_VAL, BATCH = 21, 13, 8  # batches of 8, 8, 5 and 8, 5


class Rows(Dataset[Any]):
    """Columns of equal length; a sample is a row, or what `make` makes of it."""

    def __init__(self, *columns: Any, make: Callable[..., Any] = lambda *row: row) -> None:
        self.columns, self.make = columns, make

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, i: int) -> Any:
        return self.make(*(column[i] for column in self.columns))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ints(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def ragged(num: int, longest: int, make: Callable[[int, int], Any], seed: int = 0, shortest: int = 2) -> list[Any]:
    """`make(length, seed)` for each of `num` samples of different lengths."""
    lengths = ints(longest + 1, num, seed=seed + 100, low=shortest).tolist()
    return [make(length, 1000 * seed + i) for i, length in enumerate(lengths)]


def both(rows: Callable[[int, int], Dataset[Any]], **loader: Any) -> Callable[[], tuple[Any, Any]]:
    """Loaders to train and to validate on, of `rows(number of samples, seed)`."""

    def make() -> tuple[Any, Any]:
        train = DataLoader(rows(NUM_TRAIN, 0), **{"batch_size": BATCH, "shuffle": True, **loader})
        return train, DataLoader(rows(NUM_VAL, 1), **{"batch_size": BATCH, **loader, "shuffle": False})

    return make


def vectors(features: int = 6, classes: int = 3) -> Callable[[], tuple[Any, Any]]:
    """Feature vectors and labels."""
    return both(lambda n, s: Rows(normal(n, features, seed=s), ints(classes, n, seed=s + 10)))


def regression(features: int = 6, targets: int = 1) -> Callable[[], tuple[Any, Any]]:
    """Feature vectors and real targets."""
    return both(lambda n, s: Rows(normal(n, features, seed=s), normal(n, targets, seed=s + 10)))


def images(size: int = 8, channels: int = 1, classes: int = 3) -> Callable[[], tuple[Any, Any]]:
    """Images and labels."""
    return both(lambda n, s: Rows(uniform(n, channels, size, size, seed=s), ints(classes, n, seed=s + 10)))


def two_views(features: int = 6, classes: int = 3) -> Callable[[], tuple[Any, Any]]:
    """((view, view), label), as a dataset with two augmentations gives them."""

    def rows(n: int, s: int) -> Rows:
        x = normal(n, features, seed=s)
        first, second = x + 0.1 * normal(n, features, seed=s + 1), x + 0.1 * normal(n, features, seed=s + 2)
        return Rows(first, second, ints(classes, n, seed=s + 10), make=lambda a, b, y: ((a, b), y))

    return both(rows)


def sentences(vocab: int = 11, longest: int = 7) -> Callable[[int, int], Sequence[Tensor]]:
    """Token sequences of different lengths; 0 is padding."""
    return lambda n, s: ragged(n, longest, lambda length, seed: ints(vocab, length, seed=seed, low=1), s)
