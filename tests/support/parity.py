"""What every strategy must equal, the same training on one device: modules, batches, a run and strategies by name.

Everything is tiny and in float64, where sums in another order differ by less than 1e-10.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from outcomes import whole
from regression import assert_same
from tiny import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer

FEATURES, CLASSES = 4, 3


class Samples(Dataset[Any]):
    """Fixed random samples; `make` shapes sample i as the module wants it."""

    def __init__(self, num: int, make: Callable[[Tensor, Tensor, int], Any]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(num, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (num,), generator=generator)
        self.make = make

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.make(self.x[i], self.y[i], i)


class Net(pl.LightningModule):
    """A small classifier that remembers every loss and every gradient that the root saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        """x and y of a batch."""
        return batch[0], batch[1]

    def size(self, batch: Any) -> int | None:
        """What to log as `batch_size`; None where Lightning can count."""
        return None

    def loss(self, batch: Any) -> Tensor:
        x, y = self.read(batch)
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=self.size(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=self.size(batch))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("test_loss", loss.detach(), batch_size=self.size(batch))
        return {"loss": loss}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(self.read(batch)[0])

    def on_after_backward(self) -> None:
        gradients = [whole(p.grad).flatten().cpu() for p in self.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(gradients).clone())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class TiedNet(Net):
    """Tied weights, a frozen layer and a ParameterList."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        self.net[2].weight = self.net[0].weight
        self.frozen = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.scales = nn.ParameterList([torch.ones(CLASSES), torch.full((CLASSES,), 0.5)])

    def forward(self, x: Tensor) -> Tensor:
        out = self.frozen(self.net(x))
        for scale in self.scales:
            out = out * scale
        return out


class GroupsNet(Net):
    """Several parameter groups, and a loss with a penalty that every chunk adds."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * self.net[0].weight.square().sum()

    def configure_optimizers(self) -> Any:
        first = {"params": self.net[0].parameters(), "lr": 0.1, "weight_decay": 0.0}
        return torch.optim.SGD([first, {"params": self.net[2].parameters()}], lr=0.05, momentum=0.9, weight_decay=0.1)


class TokenNet(Net):
    """A loss that is a mean over valid tokens: its weight is their number, which differs between chunks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.read(batch)
        valid = (x > 0).sum(1).to(x.dtype)
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        loss = (losses * valid).sum() / valid.sum().clamp(min=1)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "loss_weight": valid.sum(), "accuracy": 0.5}


class SumNet(Net):
    """A loss that is a sum over samples."""

    def loss(self, batch: Any) -> Tensor:
        x, y = self.read(batch)
        return nn.functional.cross_entropy(self(x), y, reduction="sum") * 0.1


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Named:
    y: Tensor
    names: list[str]


def collate_nested(samples: list[Any]) -> Any:
    rows = default_collate(samples)
    return {**rows, "nested": [Named(rows["pair"].y, rows.pop("name"))]}


class DictNet(Net):
    """Its batches are dicts of a namedtuple and a list of a dataclass."""

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        [named] = batch["nested"]
        assert isinstance(batch["pair"], Pair)
        assert [int(name[1:]) for name in named.names] == batch["index"].tolist()
        return batch["pair"].x, named.y

    def size(self, batch: Any) -> int:
        return len(batch["index"])


def as_tuple(x: Tensor, y: Tensor, i: int) -> Any:
    return x, y


def as_dict(x: Tensor, y: Tensor, i: int) -> Any:
    return {"pair": Pair(x, y), "name": f"n{i}", "index": i}


class SparseNet(Net):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(3, FEATURES, sparse=True), nn.Linear(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x[:, 0] > 0).long())

    def on_after_backward(self) -> None:
        gradients = [p.grad.to_dense().flatten().cpu() for p in self.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(gradients))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        module: makes the module.
        make: shapes a sample.
        num: samples; 10 in batches of 4 end with a ragged batch of 2.
        batch_size: samples per global batch.
        collate: of the loader.
        trainer: further arguments of the trainer.
        strategy: further arguments of the strategy that is compared.
        tolerance: largest allowed difference.
        dtype: of parameters and samples.
    """

    module: Callable[[], Net] = Net
    make: Callable[[Tensor, Tensor, int], Any] = as_tuple
    num: int = 10
    batch_size: int = 4
    collate: Any = None
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10
    dtype: torch.dtype = torch.float64

    def loader(self) -> DataLoader[Any]:
        samples = Samples(self.num, self.make)
        samples.x = samples.x.to(self.dtype)
        return DataLoader(samples, batch_size=self.batch_size, collate_fn=self.collate)


CASES = {
    "ragged": Case(),
    "one_sample_left": Case(num=9),
    "smaller_than_devices": Case(num=7, batch_size=3),
    "accumulation_with_a_short_tail": Case(num=22, trainer={"accumulate_grad_batches": 4}),
    "exact_accumulation": Case(num=22, trainer={"accumulate_grad_batches": 4, "exact_accumulation": True}),
    "exact_accumulation_of_weights": Case(
        TokenNet, num=22, trainer={"accumulate_grad_batches": 4, "exact_accumulation": True, "gradient_clip_val": 0.1}
    ),
    "clip_by_norm": Case(trainer={"gradient_clip_val": 0.1}),
    "clip_by_value": Case(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "float32": Case(dtype=torch.float32, tolerance=1e-5),
    "bf16": Case(dtype=torch.float32, trainer={"precision": "bf16-mixed"}, tolerance=8e-3),
    "tied_frozen_parameter_list": Case(TiedNet),
    "groups_and_penalty": Case(GroupsNet),
    "loss_weight": Case(TokenNet),
    "loss_weight_accumulated": Case(TokenNet, num=22, trainer={"accumulate_grad_batches": 2}),
    "sum": Case(SumNet),
    "dict": Case(DictNet, as_dict, collate=collate_nested),
}
"""Ways to train, by name; a strategy that can't serve one says so where it is compared."""


@dataclass
class Run:
    """What a training left behind."""

    losses: Tensor
    gradients: Tensor
    weights: Tensor
    metrics: dict[str, Tensor]
    tested: dict[str, float]
    predictions: Tensor
    keys: list[str]


def make_module(case: Case) -> Net:
    """The case's module, with the same weights every time."""
    torch.manual_seed(3)
    return case.module().to(case.dtype)


def make_trainer(case: Case, strategy: Any, trainer_class: type[pl.Trainer] = Trainer, **options: Any) -> pl.Trainer:
    return quiet(trainer_class, strategy=strategy, **{"max_epochs": 2, **case.trainer, **options})


def fit(case: Case, module: Net, strategy: Any, devices: int = 2, **options: Any) -> pl.Trainer:
    """Fit a module on several devices, and nothing else."""
    trainer = make_trainer(case, strategy, devices=devices, **options)
    trainer.fit(module, case.loader(), case.loader())
    return trainer


def run(case: Case, strategy: Any, trainer_class: type[pl.Trainer] = Trainer, **options: Any) -> Run:
    """Fit, validate, test and predict with a strategy.

    Args:
        case: the way to train.
        strategy: an object, or a name.
        trainer_class: whose trainer; Lightning's own to prove that the strategy needs no other.
        **options: further arguments of the trainer.
    """
    torch.manual_seed(11)
    module, loader = make_module(case), case.loader()
    trainer = make_trainer(case, strategy, trainer_class, **options)
    trainer.fit(module, loader, case.loader())
    metrics = dict(trainer.callback_metrics)
    tested = trainer.test(module, loader, verbose=False)[0]
    predictions = trainer.predict(module, loader)
    assert predictions is not None
    return Run(
        losses=torch.tensor(module.losses, dtype=torch.float64),
        gradients=torch.stack(module.gradients).double(),
        weights=torch.cat([whole(p.detach()).flatten().cpu() for p in module.parameters()]).double(),
        metrics=metrics,
        tested=dict(tested),
        predictions=torch.cat([torch.empty(0), *(torch.as_tensor(p).cpu() for p in predictions)]).double(),
        keys=list(module.state_dict()),
    )


_BASELINES: dict[Any, tuple[Case, Run]] = {}  # with the case, so that no other object has its parts' ids


def baseline(case: Case) -> Run:
    """The same training on one device, computed once."""
    parts = (case.module, case.make, case.collate)
    key = (*map(id, parts), case.num, case.batch_size, case.dtype, repr(case.trainer))
    if key not in _BASELINES:
        _BASELINES[key] = (case, run(case, SingleDeviceStrategy(), devices=1))
    return _BASELINES[key][1]


def assert_equal(found: Run, expected: Run, tolerance: float, of_a_rank: bool = False) -> None:
    """Compare loss, gradients, weights, logged metrics and outputs; a rank has the loss of its own samples only."""
    names = ("losses", "gradients", "weights", "predictions", "keys")[of_a_rank:]
    assert_same(*({name: getattr(run, name) for name in names} for run in (found, expected)), tolerance)
    for mine, theirs in ((found.metrics, expected.metrics), (found.tested, expected.tested)):
        # Lightning keeps logged values in float32 where the default dtype is
        assert_same(*({name: float(x) for name, x in of.items()} for of in (mine, theirs)), max(tolerance, 1e-6))


Plan = tuple[int, Callable[..., Any]]
"""Number of devices or ranks, and a strategy that must train as one device does (law 1)."""


def balanced(**policy: Any) -> Callable[..., Any]:
    return lambda **options: BalancedDataParallelStrategy(**policy, **options)


PLANS: dict[str, Plan] = {
    **{f"dp-{num}": (num, DataParallelStrategy) for num in range(1, 5)},
    "dp-threads": (3, lambda **options: DataParallelStrategy(threads=True, **options)),
    "balanced_dp-gpu0_chunk=0": (3, balanced(gpu0_chunk=0)),
    "balanced_dp-gpu0_chunk=1": (2, balanced(gpu0_chunk=1)),
    "balanced_dp-weights=1,0,3": (3, balanced(weights=[1, 0, 3])),
    "balanced_dp-weights=0,1": (2, balanced(weights=[0, 1])),
    "balanced_dp-auto": (2, balanced(weights="auto")),
    **{f"model_parallel-2-{m}": (2, partial(ModelParallelStrategy, num_microbatches=m)) for m in range(1, 5)},
}
"""For model_parallel devices are stages, then come micro-batches."""

Ranks = partial(DDPStrategy, batch_size_is="global", timeout_s=120)
Shards = partial(FSDPStrategy, batch_size_is="global", timeout_s=120)

RANK_PLANS: dict[str, Plan] = {
    **{f"fsdp-{num}": (num, Shards) for num in (2, 1, 3)},
    **{f"fsdp-{num}-kept": (num, partial(Shards, reshard_after_forward=False)) for num in (1, 2, 3)},
    "fsdp-4-replicas=2": (4, partial(Shards, replicas=2)),
    "fsdp-2-weights=3,1": (2, partial(Shards, weights=[3, 1])),
    "fsdp-3-weights=1,0,3": (3, partial(Shards, weights=[1, 0, 3])),
    "fsdp-2-cpu_offload": (2, partial(Shards, cpu_offload=True)),
    **{f"ddp-{num}-shard_optimizer": (num, partial(Ranks, shard_optimizer=True)) for num in (2, 3)},
}
