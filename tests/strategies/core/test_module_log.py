"""What a module logs goes to whoever a step names, and to its own `log` otherwise."""

import copy
from typing import Any

import pytorch_lightning as pl
import torch

from evener.strategies.core.module_log import ModuleLog, log_nothing, module_log, received, restore_logs
from evener.strategies.distributed.metrics.sync import MetricSync
from evener.strategies.ranks.step import zero_weight_step


class Outer(pl.LightningModule):
    """Holds another LightningModule, which logs too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pl.LightningModule()


def listening(module: pl.LightningModule) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    vars(module)["log"] = lambda *args, **options: calls.append((*args, options))
    return calls


def test_a_step_without_weight_gives_none_to_what_inner_modules_log() -> None:
    """Only the outer module's values were neutralised, so that those of the samples that stand in counted."""
    outer = Outer()
    own, inner = listening(outer), listening(outer.inner)
    with zero_weight_step(outer, MetricSync()):
        outer.log("a", 2.0, batch_size=4)
        outer.inner.log("b", torch.tensor(3.0), False, reduce_fx="max")
    outer.log("a", 2.0)
    assert own == [("a", 0.0, {"batch_size": 0}), ("a", 2.0, {})]
    assert inner == [("b", float("-inf"), {"prog_bar": False, "reduce_fx": "max", "batch_size": 0})]


def test_a_silent_step_logs_nothing() -> None:
    outer = Outer()
    own, inner = listening(outer), listening(outer.inner)
    with zero_weight_step(outer, MetricSync(), silent=True):
        outer.log("a", 2.0)
        outer.inner.log("b", 2.0)
    assert own == inner == []


def test_receivers_are_put_back_and_the_modules_own_log_is_restored() -> None:
    outer = Outer()
    mine = vars(outer)["log"] = lambda *args, **options: None
    log = module_log(outer)
    assert module_log(outer) is log
    module_log(outer.inner)
    with received([(log, log_nothing)]), received([(log, log.without_weight)]):
        pass
    assert log.receiver is None
    restore_logs(outer)
    assert vars(outer)["log"] is mine
    assert "log" not in vars(outer.inner)


def test_a_copied_module_logs_by_itself() -> None:
    outer = Outer()
    module_log(outer)
    copied = copy.deepcopy(outer)
    assert not isinstance(copied.log, ModuleLog)
    assert copied.log.__self__ is copied
