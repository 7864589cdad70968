"""strategy.recompute: activations are computed once more in the backward pass, exactly, and are not kept till then."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from parity import Case, Net, assert_equal, run
from torch import Tensor, nn

from evener.strategies import ConfigError, DataParallelStrategy, ModelParallelStrategy, SingleDeviceStrategy
from evener.strategies.pipeline.recompute import Recompute, verify_threads
from evener.trainer.plan._simulation import MemoryTracker


class Block(nn.Module):
    """Draws from all random streams, counts its calls, keeps a list and a tensor, and normalises by its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 16), nn.Linear(16, 4), nn.BatchNorm1d(16)
        self.calls = 0
        self.seen: list[float] = []
        self.total = torch.zeros(9)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        self.total += 1
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.up(x))), 0.3, self.training)
        if self.training:
            hidden = hidden * (1 + 0.1 * random.random()) + 0.1 * float(np.random.random())
        self.last = hidden
        return x + self.down(hidden) * (1 + 0.01 * self.calls + 0.001 * len(self.seen) + 0.01 * self.total[0])


class BlockNet(Net):
    """Three blocks between two layers; what the second block has kept is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), Block(), Block(), Block(), nn.Linear(4, 3))

    def on_train_start(self) -> None:
        pl.seed_everything(5, verbose=False)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        kept = self.net[2].last
        assert kept is not None
        return loss + 0.01 * kept.square().mean()


class PlainBlock(nn.Module):
    """Keeps of n samples what its second layer takes, 16·n numbers, as input and result of tanh, once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class PlainNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), PlainBlock(), PlainBlock(), PlainBlock(), nn.Linear(4, 3))


BLOCKS = Case(BlockNet, num=23, batch_size=6, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
PLAIN = Case(PlainNet, num=23, batch_size=6, trainer={"accumulate_grad_batches": 2})
Stages = partial(ModelParallelStrategy, num_microbatches=3)


@pytest.mark.parametrize(
    ("case", "strategy", "devices", "options"),
    [
        (BLOCKS, SingleDeviceStrategy, 1, ("always", "except_last", ["net.2"], ["net"])),
        (PLAIN, DataParallelStrategy, 3, ("always",)),
        (PLAIN, Stages, 2, ("always", "except_last")),
    ],
)
def test_a_module_trains_bit_by_bit_as_without(case: Case, strategy: Any, devices: int, options: Any) -> None:
    expected = run(case, strategy(), devices=devices)
    for option in options:
        assert_equal(run(case, strategy(recompute=option), devices=devices), expected, 0.0)


def kept_bytes(option: Any, module: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass leaves."""
    module.zero_grad()
    recompute = Recompute(option, "test")
    recompute.install(module)
    tracker = MemoryTracker()
    for tensor in (x, *module.parameters()):
        tracker.track(tensor)
    before = tracker.live[x.device]
    with tracker:
        loss = module(x).sum()
        kept = tracker.live[x.device] - before
        loss.backward()
    recompute.remove()
    assert not any("forward" in vars(part) for part in module.modules())
    return kept


def test_a_forward_pass_keeps_the_boundaries_alone() -> None:
    chain, x = nn.Sequential(*(PlainBlock() for _ in range(3))).eval(), torch.randn(5, 4)
    boundary, inside, loss = 5 * 4 * 4, 5 * 16 * 4, 4
    # 2 boundaries between 3 blocks (the input counts for nobody); the sum keeps nothing
    assert kept_bytes("never", chain, x) == 2 * boundary + 3 * inside + loss
    assert kept_bytes("always", chain, x) == 2 * boundary + loss
    assert kept_bytes("except_last", chain, x) == 2 * boundary + inside + loss


class Drops(PlainBlock):
    """Has not saved its input, to which its result is added."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.drop(x)))


class Residual(Net):
    """Adds a block's result to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head, self.second = Drops(), nn.Linear(4, 3), nn.Sequential(PlainBlock(), PlainBlock())

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.block(x)
        return self.head(self.second(x))


def test_inputs_that_change_are_refused_before_the_first_step() -> None:
    case = Case(Residual, num=8)
    run(case, SingleDeviceStrategy())
    with pytest.raises(ConfigError, match="Drops has an input that was written to"):
        run(case, SingleDeviceStrategy(recompute="always"))


def test_what_is_written_to_before_the_backward_pass_is_refused() -> None:
    module = nn.Sequential(PlainBlock(), PlainBlock())
    Recompute("always", "test").install(module)
    loss = module(torch.ones(2, 4)).sum()
    with torch.no_grad():
        module[0].down.bias.add_(1)
    with pytest.raises(ConfigError, match=r"PlainBlock has a parameter \(down.bias\) that was written to"):
        loss.backward()


class CompiledNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


@pytest.mark.parametrize(
    ("module", "option", "message"),
    [
        (Net, "sometimes", "recompute=sometimes is not allowed. Give never, always, except_last or a list"),
        (Net, ["net.nine"], r"Net has no module 'net.nine'; the nearest are net"),
        (Net, "always", "finds nothing to recompute in Net"),
        (CompiledNet, "always", "whose compiler decides what is recomputed"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(module: type[Net], option: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(Case(module), SingleDeviceStrategy(recompute=option))


def test_replicas_in_threads_that_share_the_cpus_random_stream_are_refused() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"dp: recompute draws .* \(cuda:0, cpu\). Set strategy.threads=false"):
        verify_threads([gpu, cpu], None, "dp")
    with pytest.raises(ConfigError, match="replicas in threads share"):
        run(PLAIN, DataParallelStrategy(recompute="always", threads=True), devices=2)


class Bypassed(PlainNet):
    """Calls a method of its second block only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net[4](self.net[3](self.net[2].up(self.net[1](x))[:, :4]))


def test_parts_that_are_not_called_are_named() -> None:
    with pytest.warns(UserWarning, match="recompute=always had no effect on net.2: the training step does not call"):
        run(Case(Bypassed), SingleDeviceStrategy(recompute="always"))
