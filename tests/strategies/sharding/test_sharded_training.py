"""strategy=fsdp: modules and callbacks train as on one device, with a shard of everything on each rank."""

import copy
import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from regression import Net, Numbered, quiet_trainer, refusal, weights, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, FSDPStrategy, SingleDeviceStrategy


class ByHand(Net):
    """Reads, clips, scales and clears the gradients of its own parameters within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        optimizer: Any = self.optimizers()
        for _ in range(2):
            self.zero_grad()
            self.manual_backward((self.net(x) - y).square().mean())
            norm = nn.utils.clip_grad_norm_(self.parameters(), 0.3)
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad *= 1 + norm.detach()
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            self.log("norm", norm, on_step=False, on_epoch=True, batch_size=1)
            optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        self.log("norms", torch.stack(norms).sum(), on_step=False, on_epoch=True, batch_size=1)


class Loose(Net):
    """Parameters of its own, tied weights, a frozen layer that thaws, and numbers, as CLIP's, one in every second step.

    Torch refused parameters without a dimension.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3).double()
        self.second = nn.Linear(3, 3).double()
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        numbers = [nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (2.6, 1.0, 0.5)]
        self.logit_scale, self.idle, self.sometimes = numbers

    def on_train_epoch_start(self) -> None:
        self.frozen.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        x = self.second(self.first(x)) * self.scale + self.frozen(x)
        scale = self.logit_scale.exp() + (self.sometimes if batch_idx % 2 else 0)
        return (self.net(x) * scale - y).square().mean() + 0.1 * self.scale.square().sum()


class Sometimes(Net):
    """A layer that takes part in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        out = self.net(x) + (self.extra(x) if batch_idx % 2 else 0)
        return (out - y).square().mean()


class Penalized(Net):
    """A penalty on a weight outside of its layer's forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.net[0].weight.square().sum()


class Followed(Net):
    """A target network follows the weights in each step, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        loss = super().training_step((x, y + 0.5 * self.target(x), index), batch_idx)
        for own, target in zip(self.net.parameters(), self.target.parameters(), strict=True):
            target.data.mul_(0.9).add_(0.1 * own.data)
        return loss


class SlopePenalized(Net):
    """With a penalty on the gradient of what it computes by its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        slope = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        return (self.net(x) - batch[1]).square().mean() + slope.square().mean()


class Complex(Net):
    """With complex parameters, of which Adam updates the real and imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        real, imaginary = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3, 1) / 10
        self.net = nn.Sequential(self.net[0], nn.Tanh(), nn.Linear(4, 3).double())
        self.last = nn.Parameter(torch.complex(real, imaginary))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.net(batch[0]).to(torch.complex128) @ self.last).abs() - batch[1]).square().mean()

    validation_step: Any = None


class Holds(Net):
    """Reads a parameter that it has held since before it was cut; a callback reads it between steps, and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = {"decayed": [self.net[0].weight]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.groups["decayed"][0].square().sum()

    def configure_callbacks(self) -> list[pl.Callback]:
        return [Reads()]


class Reads(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        weight = pl_module.groups["decayed"][0]
        pl_module.log("norm", weight.norm().item(), on_epoch=True, batch_size=1)
        weight.data.mul_(0.9)


class Summed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().sum()


class Last(nn.LSTM):
    """A layer whose weights cuDNN moves to one piece of memory, in the first forward after they are others."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x[:, None])[0][:, -1]

    def flatten_parameters(self) -> None:
        with torch.no_grad():
            for weight in self._flat_weights:
                torch.Tensor.set_(weight, weight.detach().clone())  # type: ignore[arg-type]


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), Last(4, 4, batch_first=True), nn.Linear(4, 1)).double()


class Experts(Net):
    """Each sample is computed by the expert that it chooses, after some steps in which all are."""

    def __init__(self, since: int = 0, seldom: tuple[int, ...] = ()) -> None:
        super().__init__()
        experts = [nn.Linear(4, 4) for _ in range(2)] if not seldom else [nn.Sequential(nn.Linear(4, 4)) for _ in "abc"]
        self.experts = nn.ModuleList(experts).double()
        self.since, self.seldom = since, torch.tensor(seldom)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        hidden = self.net[1](self.net[0](x))
        for i, expert in enumerate(self.experts):
            chosen = torch.where(torch.isin(index, self.seldom), 2, index % 2) == i
            if self.global_step < self.since:
                hidden = expert(hidden)
            elif chosen.any():
                hidden = hidden + torch.zeros_like(hidden).index_put((chosen,), expert(hidden[chosen]))
        return (self.net[2](hidden) - y).square().mean()


class Way(NamedTuple):
    """A module, options of fsdp and of the trainer, samples, those of a batch, and what is run before it is fitted."""

    make: Callable[[], Net] = Net
    options: dict[str, Any] = {}  # noqa: RUF012
    trainer: Callable[[], dict[str, Any]] = dict
    num: int = 21
    size: int = 6
    fits: int = 1
    is_evaluated_first: bool = False


WHOLE, KEPT, UNUSED = {"shard": []}, {"reshard_after_forward": False}, {"find_unused_parameters": True}
EXPERTS = {**UNUSED, "shard": ["experts.0", "experts.1"]}


def averaged(**options: Any) -> dict[str, Any]:
    return {"callbacks": [EMAWeightAveraging(decay=0.7)], **options}


WAYS = {
    "gradients by hand": Way(ByHand),
    "loose, tied, frozen, numbers": Way(Loose, {}, lambda: averaged(accumulate_grad_batches=2, gradient_clip_val=0.1)),
    "unused": Way(Sometimes, UNUSED),
    "penalty on a weight": Way(Penalized),
    "target network that follows": Way(Followed),
    "moving average": Way(Net, KEPT, lambda: averaged(val_check_interval=1)),
    "stochastic average": Way(Net, {}, lambda: {"callbacks": [StochasticWeightAveraging(0.1, 0.5)], "max_epochs": 4}),
    "unequal shares": Way(Net, {"weights": [3, 1]}),
    # Adam's view of their real and imaginary parts was read as complex numbers: an error of torch's
    "complex parameters": Way(Complex, num=9, size=4),
    # ranks with samples asked each shard `is_inference`, which gathered it: gloo ended rank 0 by SIGABRT
    "a first batch without samples for a rank": Way(Net, {}, lambda: {"limit_val_batches": 0}, 3, 1),
    "a parameter kept from before": Way(Holds, WHOLE, num=6, size=3),
    # shards "could not be compared", so that the second run counted by samples
    "a second fit of a sum": Way(Summed, num=9, size=4, fits=2),
    # what an evaluation had cut was not verified: a sum counted by samples, in silence
    "an evaluation before": Way(Summed, num=11, size=4, is_evaluated_first=True),
    # failed on a GPU: torch's FSDP gathered weights into memory that cuDNN no longer looked at
    "a recurrent layer": Way(Recurrent, {"shard": ["net.1"]}, num=16, size=4),
    # hung: one rank gathered the expert's layer, and none of the few samples had chosen it
    "an expert that few samples choose": Way(partial(Experts, seldom=(7,)), UNUSED, num=12, size=2),
    # gathered for the whole step, since ranks gather the parts of a module in one order
    "experts that samples choose": Way(Experts, UNUSED | KEPT, num=8, size=2),
    "a gradient in a step": Way(SlopePenalized),
}


def _fit(way: Way, num_ranks: int, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Weights and logged values."""
    module, found = way.make(), {}
    ranked = partial(FSDPStrategy, batch_size_is="global", **{"timeout_s": 60, **way.options})
    for _ in range(way.fits):
        strategy = SingleDeviceStrategy() if num_ranks == 1 else ranked()
        trainer = quiet_trainer(strategy, num_ranks, **way.trainer(), **options)
        evaluated = DataLoader(Numbered(11), 4)
        if way.is_evaluated_first:
            trainer.validate(module, evaluated, verbose=False)
        trainer.fit(module, DataLoader(Numbered(way.num), way.size), evaluated)
        assert isinstance(next(module.parameters()), DTensor) == (num_ranks > 1)
        found = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return weights(module), found


def _fit_named(names: list[str], num_ranks: int) -> dict[str, Any]:
    return {name: _fit(WAYS[name], num_ranks) for name in names}


def _assert_as_on_one_device(num_ranks: int, names: list[str]) -> None:
    by_rank = run_ranks(_fit_named, num_ranks, names, num_ranks, timeout_s=400)
    for name in names:
        single, metrics = _fit(WAYS[name], 1)
        for rank in by_rank:
            torch.testing.assert_close(
                rank[name][0], single, rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
            )
        assert by_rank[0][name][1] == pytest.approx(metrics, abs=1e-12), name


@pytest.mark.parametrize("half", range(2))
def test_modules_and_callbacks_train_as_on_one_device(half: int) -> None:
    _assert_as_on_one_device(2, list(WAYS)[half::2])


@pytest.mark.slow
def test_modules_and_callbacks_train_on_three_ranks_as_on_one_device() -> None:
    _assert_as_on_one_device(3, [name for name in WAYS if name != "unequal shares"])


def _told(kind: type[Net]) -> str:
    stream, logger = io.StringIO(), logging.getLogger("pytorch_lightning.utilities.rank_zero")
    logger.addHandler(logging.StreamHandler(stream))
    logger.setLevel(logging.INFO)
    _fit(Way(kind), 2, max_epochs=1, limit_train_batches=1)
    return stream.getvalue()


@pytest.mark.parametrize(("kind", "gathered"), [(Net, False), (Followed, True), (Penalized, True)])
def test_parts_are_gathered_for_the_whole_step_only_where_it_needs_them(kind: type[Net], gathered: bool) -> None:
    first, _ = run_ranks(_told, 2, kind)
    assert ("gathered for the whole step: net.0" in first) is gathered


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (
            Way(SlopePenalized, {"shard": ["net.0", "net.2"]}),
            r"has released, because training_step .* Set strategy\.shard=\[\]",
        ),
        *(
            (
                Way(partial(Experts, since), EXPERTS, num=8, size=2),
                r"gathering experts\..', but rank \d .* set strategy\.shard=\[\]",
            )
            for since in (0, 2)
        ),
    ],
)
def test_parts_by_name_that_a_step_needs_otherwise_are_refused_with_the_remedy(way: Way, told: str) -> None:
    with pytest.raises(RankError, match=told):
        run_ranks(_fit, 2, way, 2)


class EvaluatedNet(Net):
    test_step = Net.validation_step


def _runs(num_ranks: int, reshard_after_forward: bool, precision: Any) -> tuple[Tensor, list[Any]]:
    """Every kind of run, one after the other in one process, and what each of them returned."""
    ranked = FSDPStrategy(batch_size_is="global", reshard_after_forward=reshard_after_forward, timeout_s=60)
    strategy = SingleDeviceStrategy() if num_ranks == 1 else ranked
    module, loader = EvaluatedNet(), DataLoader(Numbered(11), 4)
    trainer = quiet_trainer(strategy, num_ranks, precision=precision)
    found: list[Any] = []
    for _ in range(2):
        trainer.fit(module, loader, loader)
        trainer.fit_loop.max_epochs = (trainer.max_epochs or 0) + 1
        found += [trainer.validate(module, loader, verbose=False), trainer.test(module, loader, verbose=False)]
        found += [torch.cat(trainer.predict(module, loader))]  # type: ignore[arg-type]
        found += [{name: whole(tensor).clone() for name, tensor in module.state_dict().items()}]
    return weights(module), found


RUNS = [(True, "64-true", 1e-10), (False, "64-true", 1e-10), (False, "bf16-true", 5e-2)]


def _all_runs(num_ranks: int) -> list[Any]:
    return [_runs(num_ranks, *way) for *way, _ in RUNS]


def test_runs_follow_one_another_in_one_process() -> None:
    """Parts stayed gathered after an evaluation step with `reshard_after_forward=false`."""
    for rank, found in enumerate(run_ranks(_all_runs, 2, 2, timeout_s=400)):
        for (*way, tolerance), (trained, shown) in zip(RUNS, found, strict=True):
            single, expected = _runs(1, *way)
            torch.testing.assert_close(trained, single, rtol=0, atol=tolerance)
            if rank == 0:
                torch.testing.assert_close(shown, expected, rtol=0, atol=max(tolerance, 1e-6))


class OptimizedBy(Net):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Sparse(Net):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 1, sparse=True).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.table(batch[2] % 4).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Changes(pl.Callback):
    """Adds or replaces a layer after a step."""

    def __init__(self, name: str, at: int) -> None:
        self.name, self.at = name, at

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            owner = pl_module if self.name == "added" else pl_module.net
            setattr(owner, self.name, nn.Linear(3 if self.name == "0" else 1, 4, dtype=torch.float64))


REFUSED: list[tuple[Any, dict[str, Any], Any, str]] = [
    (Sometimes, {"find_unused_parameters": False}, None, "0: fsdp: parameters took no part in the loss: extra.weight"),
    (Penalized, {"shard": ["net.0"]}, None, "0: fsdp: a step uses a parameter of a part outside of the part's forward"),
    (lambda: OptimizedBy(torch.optim.LBFGS), {}, None, "0: fsdp: `view` is called with a parameter, gradient or"),
    (
        lambda: OptimizedBy(torch.optim.Adafactor),
        {},
        None,
        "0: fsdp: `new_zeros` is called with a parameter, gradient or",
    ),
    (Sparse, {}, None, "0: fsdp: the gradient of table.weight is sparse, and can't be cut over the ranks"),
    (Net, {}, lambda: ModelPruning("l1_unstructured", amount=0.3), "0: fsdp: ModelPruning replaces parameters, which"),
    # one that was added ended with a KeyError after training; one that was replaced was said to be unused
    (Net, {}, lambda: Changes("added", 2), "2: fsdp: added.weight, added.bias was added, or replaced"),
    (Net, {}, lambda: Changes("0", 2), "2: fsdp: net.0.weight, net.0.bias was added, or replaced"),
    (Net, {}, lambda: Changes("added", 4), "4: "),  # after the last step
]


def _refusals(num_ranks: int) -> list[str]:
    told = []
    for make, own, callback, _ in REFUSED:
        strategy = FSDPStrategy(**own, batch_size_is="global", timeout_s=60)
        callbacks = [] if callback is None else [callback()]
        trainer = quiet_trainer(strategy, num_ranks, max_epochs=1, callbacks=callbacks)
        said = ""
        try:
            trainer.fit(make(), DataLoader(Numbered(), 6))
        except (ConfigError, RuntimeError) as exc:
            said = str(exc)
        told.append(f"{trainer.global_step}: {said}")
    return told


def test_what_cannot_be_trained_exactly_is_refused() -> None:
    for told in run_ranks(_refusals, 2, 2):
        for message, (*_, expected) in zip(told, REFUSED, strict=True):
            assert message.startswith(expected)


def _second_runs(num_ranks: int) -> list[str]:
    told, module = [], Net()
    quiet_trainer(FSDPStrategy(), num_ranks, precision="64-true", max_steps=1).fit(module, DataLoader(Numbered(), 6))
    for options, precision in (
        ({"reshard_after_forward": False}, "64-true"),
        ({"shard": []}, "32-true"),
        ({}, "bf16-true"),
    ):
        trainer = quiet_trainer(FSDPStrategy(timeout_s=60, **options), num_ranks, precision=precision)
        with pytest.raises(ConfigError) as caught:
            trainer.validate(module, DataLoader(Numbered(), 6), verbose=False)
        told.append(str(caught.value))
    averages = quiet_trainer(FSDPStrategy(timeout_s=60), num_ranks, callbacks=[EMAWeightAveraging()])
    return [*told, refusal(averages, module, DataLoader(Numbered(), 6))]


def test_a_second_run_that_would_cut_the_module_in_another_way_is_refused() -> None:
    for *told, copied in run_ranks(_second_runs, 2, 2):
        assert copied.startswith("fsdp: Net is cut over the ranks, so that it can't be copied (copy.deepcopy)")
        assert len(told) == 3
        for line in told:
            assert "with ShardOptions(shard='auto', reshard_after_forward=True, " in line


BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "sharded_memory.py"
RUNTIME_MIB = 80
"""What a rank takes besides tensors: buffers of gloo, and code that is first run in training."""


@pytest.mark.slow
def test_what_one_process_cannot_hold_trains_in_shards() -> None:
    """48 layers of 4 MiB: weights and AdamW's state are 576 MiB, with gradients 768; each process may map 560 more.

    The shards of 2 and 3 ranks, with gradients, are 384 and 256 MiB; one layer and its gradient are 8.
    """
    command = [sys.executable, BENCHMARK, "--strategies", "single_device", "fsdp", "--limit_mib", "560"]
    done = subprocess.run([*command, "--timeout_s", "250"], capture_output=True, text=True, timeout=560, check=True)
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    found = {(name.strip(), int(ranks)): peak for name, ranks, _, peak in rows}
    assert found["single_device", 1].strip().startswith("failed: Out of memory on cpu, rank 0, in step 0")
    for num_ranks, ideal in ((2, 384 + 8), (3, 256 + 8)):
        peaks = [int(peak) for peak in re.findall(r"(\d+) MiB", found["fsdp", num_ranks])]
        assert len(peaks) == num_ranks, found
        assert max(peaks) <= ideal + RUNTIME_MIB
