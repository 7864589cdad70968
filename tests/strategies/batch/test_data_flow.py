"""What a step makes of its batch before the model is seen by the operations that it calls, in the first step alone."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from distributed import run_ranks
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError, DataParallelStrategy, DDPStrategy, ModelParallelStrategy
from evener.strategies.batch.checks._data_flow import DataFlow

NUM, WIDTH = 4, 6
X, Y = torch.linspace(-1, 2, NUM * WIDTH).sin().view(NUM, WIDTH), torch.tensor([0, 1, 2, 1])
LAYER = nn.Linear(WIDTH, 3)
TABLE = torch.linspace(0, 1, 2 * NUM)


def loss_of(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(LAYER(x), y)


def halves(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :3] = x.flip(0)[:, :3]
    return x


def read(x: Tensor, y: Tensor) -> Tensor:
    """A step that keeps its loss and accuracy as numbers of Python."""
    result = LAYER(x)
    loss = F.cross_entropy(result, y)
    with torch.no_grad():
        accuracy = (result.argmax(1) == y).float().mean()
    assert [loss.item(), loss.detach().item(), accuracy.item()]
    return loss


Step = Callable[[Tensor, Tensor], Any]
APART: dict[str, Step] = {
    "plain": loss_of,
    "each sample's own mean": lambda x, y: loss_of((x - x.mean(1, keepdim=True)) / x.std(-1, keepdim=True), y),
    "views": lambda x, y: loss_of(torch.cat([x, -x]), torch.cat([y, y])),
    "features first": lambda x, y: loss_of(x.t().cumsum(0).t(), y),
    "a table": lambda x, y: loss_of(x * TABLE[y][:, None], y),
    "noise": lambda x, y: loss_of(x + torch.randn(NUM, 1)[torch.randperm(NUM)], y),
    "products of each": lambda x, y: loss_of((x[:, :, None] @ x[:, None]).sum(2), y),
    "accuracy": lambda x, y: ((LAYER(x).argmax(1) == y).float().mean(), loss_of(x, y)),
    "a mean that is logged": lambda x, y: (x.mean(0), x[0], x.flip(0), loss_of(x, y)),
    "results that are read": read,
    "a teacher": lambda x, y: loss_of(x, torch.no_grad()(LAYER)(x).argmax(1)),
}
MIXED: dict[str, tuple[Step, str]] = {
    "mixture": (lambda x, y: loss_of(0.7 * x + 0.3 * x.flip(0), y), "flip"),
    "at random": (lambda x, y: loss_of(0.7 * x + 0.3 * x[torch.randperm(NUM)], y), "index"),
    "targets": (lambda x, y: loss_of(x, y.roll(1)), "roll"),
    "halves": (lambda x, y: loss_of(halves(x), y), "flip"),
    "centred": (lambda x, y: loss_of(x - x.mean(0), y), "mean"),
    "scaled": (lambda x, y: loss_of(x / x.max(), y), "max"),
    "sums": (lambda x, y: loss_of(x.cumsum(0), y), "cumsum"),
    "attention over samples": (lambda x, y: loss_of((x @ x.t()).softmax(1) @ x, y), "mm"),
    "another view": (lambda x, y: loss_of(x - x.view(2, -1).view(NUM, -1).amax(0), y), "amax"),
}
UNCLEAR: dict[str, Step] = {
    "sums over samples in the last dimension": lambda x, y: loss_of(x.t().cumsum(1).t(), y),
    "the same of results": lambda x, y: F.cross_entropy(LAYER(x).t().softmax(1).t(), y),
    "a number": lambda x, y: loss_of(x, y) * (x.std().item() * 2),
    "a loop over samples": lambda x, y: sum(loss_of(a[None], b[None]) for a, b in zip(x, y, strict=True)),
    "a mask of samples": lambda x, y: loss_of(x[y > 0], y[y > 0]),
}


def seen(step: Step) -> tuple[str, bool]:
    x, y = X.clone(), Y.clone()
    with DataFlow([x, y], NUM) as flow:
        step(x, y)
    return flow.mixed_by, flow.may_mix


@pytest.mark.parametrize("name", APART)
def test_what_leaves_samples_apart_is_passed(name: str) -> None:
    assert seen(APART[name]) == ("", False)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_named(name: str) -> None:
    step, operation = MIXED[name]
    assert seen(step)[0] == operation


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_may_mix_samples_is_seen(name: str) -> None:
    assert seen(UNCLEAR[name]) == ("", True)


def test_what_is_compiled_is_compiled_under_it_and_later() -> None:
    ran = list[int]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return lambda *args: (ran.append(1), graph(*args))[1]

    torch._dynamo.reset()
    layer = torch.compile(nn.Linear(WIDTH, 3), backend=backend)
    assert seen(lambda x, y: F.cross_entropy(layer(x), y)) == ("", False)
    layer(X)
    assert len(ran) == 2


class Mixing(pl.LightningModule):
    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.step, self.calls = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 3)), step, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append(len(batch[0]))
        return self.step(*batch, self.layers)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


TRAINED: dict[str, Callable[..., Tensor]] = {
    "plain": lambda x, y, net: F.cross_entropy(net(x), y),
    "mixture": lambda x, y, net: F.cross_entropy(net(0.7 * x + 0.3 * x.flip(0)), y),
    "sums": lambda x, y, net: F.cross_entropy(net(x.t().cumsum(1).t()), y),
    "sums of results": lambda x, y, net: F.cross_entropy(net(x).t().cumsum(1).t(), y),
    "numbers": lambda x, y, net: F.cross_entropy(net(x), y) * (x.max().item() * x.std().item()),
    "sorted pairs": lambda x, y, net: F.cross_entropy(net(x[x[:, 0].argsort()]), y[x[:, 0].argsort()]),
    "own means": lambda x, y, net: F.cross_entropy(net(x - x.mean(1, keepdim=True)), y),
    "loop": lambda x, y, net: torch.stack([F.cross_entropy(net(a), b) for a, b in zip(x, y, strict=True)]).mean(),
    "at random": lambda x, y, net: F.cross_entropy(net(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y),
}
REFUSED = {"mixture", "sums", "sums of results", "numbers"}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "dp": DataParallelStrategy,
    "model_parallel": lambda: ModelParallelStrategy(num_microbatches=2),
    "ddp": lambda: DDPStrategy(batch_size_is="global", timeout_s=60),
}


def told(strategy: str, name: str) -> str:
    """The refusal of a run of two steps, or the warning; empty if there is neither."""
    module = Mixing(TRAINED[name])
    data = TensorDataset(torch.linspace(0, 9, 12 * WIDTH).cos().view(12, WIDTH), torch.arange(12) % 3)
    log = _Lines()
    logging.getLogger("evener.strategies.batch.checks.loss_check").addHandler(log)
    try:
        quiet_trainer(STRATEGIES[strategy](), 2, max_steps=2).fit(module, DataLoader(data, 6))
    except ConfigError as exc:
        return str(exc)
    finally:
        logging.getLogger("evener.strategies.batch.checks.loss_check").removeHandler(log)
        assert "training_step" not in vars(module)
    if name == "plain":
        assert sorted(module.calls) == ([3, 3] if strategy == "ddp" else [3] * 4)  # no trial is made
    return "".join(log.lines)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def assert_told(strategy: str, name: str, found: str) -> None:
    if name in REFUSED:
        assert found.startswith(f"{strategy}: the loss is not the mean over samples")
    elif name == "at random":
        assert "it reads the batch mixed by index" in found
    else:
        assert found == ""


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("strategy", ["dp", "model_parallel"])
def test_strategies_of_one_process_refuse_what_samples_show_to_be_mixed(strategy: str, name: str) -> None:
    assert_told(strategy, name, told(strategy, name))


def _told_on_ranks() -> dict[str, str]:
    warnings.simplefilter("ignore")
    return {name: told("ddp", name) for name in TRAINED}


def test_ranks_refuse_what_samples_show_to_be_mixed() -> None:
    for name, found in run_ranks(_told_on_ranks, 2, timeout_s=120)[0].items():
        assert_told("ddp", name, found)
