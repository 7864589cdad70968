"""What is particular to replicas: state, placement, counted copies, refused input. Parity is in test_parity.py."""

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import CASES, CLASSES, FEATURES, Case, Net, TokenNet, assert_equal, baseline, make_module, make_trainer, run
from torch import Tensor, nn

from evener.strategies import (
    BalancedDataParallelStrategy,
    ConfigError,
    DataParallelStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

CPU = torch.device("cpu")


def fit(module: pl.LightningModule, strategy: Any, case: Case = CASES["ragged"], **options: Any) -> pl.Trainer:
    trainer = make_trainer(case, strategy, **{"devices": 3, "max_epochs": 1, **options})
    trainer.fit(module, case.loader(), case.loader())
    return trainer


def test_what_a_user_has_put_in_place_of_log_is_called_and_stays() -> None:
    module, names = Net().double(), set[str]()
    mine = lambda name, *args, **options: names.add(name)  # noqa: E731
    module.log = mine  # type: ignore[method-assign]
    fit(module, "dp", max_steps=1)
    assert module.log is mine
    assert names == {"train_loss", "val_loss"}


def test_replicas_are_whole_modules(tmp_path: Path) -> None:
    """Pain 34: `self.device`, `parameters()`, lists of layers, trainer and log work on every replica, silently."""
    seen: list[tuple[Any, ...]] = []

    class Curious(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [self.net[0], self.net[2]]  # a plain list beside the registered modules
            self.scales = nn.ParameterList([torch.ones(1)])
            self.read_twice = self.read  # a bound method
            self.net[0].register_forward_hook(self.hook)
            self.lock, self.file, self.generator = threading.Lock(), file, (i for i in range(100))

        def hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
            assert layer is self.net[0]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.layers[0] is self.net[0]
            assert self.read_twice.__self__ is self
            with self.lock:
                self.file.write(f"{next(self.generator)} ")
            seen.append((self.device, sum(p.numel() for p in self.parameters()), len(self.scales), self.global_step))
            return super().training_step(batch, batch_idx) * self.scales[0].squeeze()

    with (tmp_path / "file").open("w") as file:
        module = Curious().double()
        fit(module, "dp", max_steps=1)
    count = sum(p.numel() for p in module.parameters())
    assert seen[-3:] == [(CPU, count, 1, 0)] * 3  # after those of the first look at a few samples
    numbers = [int(number) for number in (tmp_path / "file").read_text().split()]
    assert numbers == list(range(len(seen)))


class BatchNormNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


@pytest.mark.parametrize(("chunk", "rows"), [(None, slice(0, 2)), (0, slice(0, 4))])
def test_batchnorm_statistics_are_those_of_the_first_chunk(chunk: int | None, rows: slice) -> None:
    """Pain 11: the root's statistics survive, as in torch; where it has no sample, the first's that has."""
    case = Case(BatchNormNet, num=4)
    module = make_module(case)
    features = module.net[0](next(iter(case.loader()))[0])[rows]
    strategy = DataParallelStrategy() if chunk is None else BalancedDataParallelStrategy(gpu0_chunk=chunk)
    fit(module, strategy, case, devices=2, limit_val_batches=0)
    expected = 0.9 * torch.zeros(8) + 0.1 * features.mean(0)
    torch.testing.assert_close(module.net[1].running_mean, expected.detach(), rtol=0, atol=1e-12)
    assert module.net[1].num_batches_tracked == 1


def test_batchnorm_never_gets_a_single_sample(caplog: pytest.LogCaptureFixture) -> None:
    """Pain 10: batches of 4, 4 and 1 samples on 4 devices: chunks of one are merged, and the log says so."""
    case = Case(BatchNormNet, num=10, batch_size=4)
    with caplog.at_level(logging.INFO):
        fit(make_module(case), "dp", case, devices=4)
    assert caplog.text.count("chunks of one are merged into others") == 1


def test_a_first_chunk_of_one_sample_with_batchnorm_goes_to_another_device() -> None:
    found: list[Tensor] = []
    for size in (0, 1):
        module = make_module(Case(BatchNormNet))
        fit(module, BalancedDataParallelStrategy(gpu0_chunk=size), Case(BatchNormNet), devices=2)
        found.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class BlockNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, block, last = self.net
        return last(block(block(first(x))))  # twice in one graph


def test_a_submodule_alone_is_replicated() -> None:
    case = Case(BlockNet)
    assert_equal(run(case, DataParallelStrategy(submodule="net.1"), devices=4), baseline(case), 1e-10)


class Returns(TokenNet):
    """Returns what has a row per sample, and what has not; no hook reads it."""

    on_train_batch_end = pl.LightningModule.on_train_batch_end

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "logits": self(batch[0]), "count": torch.tensor(3)}


class Reads(Returns):
    def __init__(self) -> None:
        super().__init__()
        self.received: list[dict[str, Any]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.received.append(dict(outputs))


@pytest.mark.parametrize("strategy", [DataParallelStrategy, lambda: ModelParallelStrategy(num_microbatches=3)])
def test_outputs_reach_the_hook_that_reads_them(strategy: Any) -> None:
    """Pain 9: only losses and scalars reach the root, unless a hook reads the others."""
    torch.manual_seed(0)
    one = Reads().double()
    other = copy.deepcopy(one)
    fit(one, SingleDeviceStrategy(), devices=1)
    fit(Returns().double(), strategy(), devices=2)
    fit(other, strategy(), devices=2)
    with pytest.raises(ConfigError, match=r"training_step\['count'\] is one number .* isn't known"):
        _ = other.received[0].pop("count") + 1
    assert set(other.received[0]) == {"loss", "loss_weight", "accuracy", "logits"}
    for expected, found in zip(one.received, other.received, strict=True):
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
@pytest.mark.parametrize("strategy", ["dp", "ddp", "model_parallel"])
def test_a_module_may_leave_out_a_step_of_its_base_class(strategy: str) -> None:
    # it was a TypeError: the step's signature was read
    module = Net().double()
    module.validation_step = None  # type: ignore[method-assign,assignment]
    fit(module, strategy, devices=2)
    assert len(module.losses) > 0


@pytest.mark.parametrize(
    ("error", "raised", "message", "threads"),
    [
        (ArithmeticError("no such key"), ArithmeticError, "no such key", False),
        (OSError(5, "disk"), RuntimeError, "OSError: .* disk", True),
    ],
)
def test_an_error_in_a_replica_names_device_and_chunk(error: Any, raised: Any, message: str, threads: bool) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self is not self.trainer.lightning_module:
                raise error
            return super().training_step(batch, batch_idx)

    with pytest.raises(raised, match=rf"{message} \[chunk 2 of 3, 1 of 4 samples, on cpu\]") as caught:
        fit(Fails().double(), DataParallelStrategy(threads=threads, verify=False))
    assert isinstance(caught.value.__cause__ or caught.value, type(error))


class VectorLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")


class NoLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"out": self(batch[0])}


class OwnSteps(Net):
    """Steps its optimizer itself, with automatic optimization on, and returns None: the trainer skips the batch.

    Each replica kept its own gradients, and the root stepped with the first chunk's (ProtoMAML of a tutorial).
    """

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "strategy", "options", "message"),
    [
        (VectorLoss, DataParallelStrategy, {}, r"returned a loss of shape \(2,\) for a chunk of 2 samples"),
        (NoLoss, DataParallelStrategy, {}, "returned a loss of type NoneType for a chunk of 2 samples"),
        (OwnSteps, DataParallelStrategy, {}, "training_step steps an optimizer, once per replica. Set automatic_optim"),
        (Manual, DataParallelStrategy, {"submodule": "net"}, "dp: manual optimization .* Use strategy=ddp"),
        (Net, DataParallelStrategy, {"loss_reduction": "sum"}, "dp: loss_reduction is no longer there. Leave it out"),
        (Net, DataParallelStrategy, {"model_parallel_size": 2}, "dp: model_parallel_size is no longer there. Choose s"),
        (Net, DataParallelStrategy, {"submodule": "nets"}, "submodule: Net has no module 'nets'; the nearest are "),
        (Net, DataParallelStrategy, {"batch_dims": {"boxes": "lists"}}, "batch_dims=.boxes: lists. is unknown. Choo"),
        *(
            (Net, BalancedDataParallelStrategy, options, message)
            for options, message in (
                ({"shard_optimizer": True}, "shard_optimizer is no longer there. Choose s"),
                ({"gpu0_chunk": -1}, "balanced_dp: gpu0_chunk=-1 is not allowed. Give a"),
                ({"weights": [1, 2, 3]}, "weights has 3 entries for 2 devices"),
                ({"weights": [1, float("nan")]}, "must be finite, >= 0"),
                ({"weights": [1, 1], "gpu0_chunk": 1}, "were both given"),
                ({"objective": "memory"}, "objective is no longer there. Leave it out: shares are measured by time"),
                ({"gpu0_chunk": "auto"}, "gpu0_chunk=auto is not allowed. Give a .* weights=auto measures"),
            )
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(module: Any, strategy: Any, options: Any, message: str) -> None:
    made = module().double()
    before = made.net[0].weight.detach().clone()
    with pytest.raises(ConfigError, match=message):
        fit(made, strategy(**options), devices=2)
    assert torch.equal(made.net[0].weight, before)


@pytest.mark.parametrize("strategy", ["dp", "model_parallel"])
def test_sync_batchnorm_is_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"{strategy}: sync_batchnorm=True synchronizes processes"):
        fit(Net().double(), strategy, devices=2, sync_batchnorm=True)
