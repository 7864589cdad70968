"""strategy=model_parallel: placement, micro-batches, parity beyond test_parity.py, and refusals."""

import threading
import weakref
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import FEATURES, Case, Net, assert_equal, baseline, fit, make_module, make_trainer, run
from pytorch_lightning.plugins import MixedPrecision
from stage_modules import DEEP, DeepNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from evener.strategies import (
    BalancedDataParallelStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPStrategy,
    ModelParallelStrategy,
)
from evener.trainer import Trainer

Halves = partial(ModelParallelStrategy, num_microbatches=2)


class CheckpointedNet(DeepNet):
    """Its blocks are computed once more in backward: all four together, on two stages."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        blocks = nn.Sequential(*self.net["blocks"])
        x = self.net["enter"](x)
        x = checkpoint(blocks, x, use_reentrant=self.reentrant) if self.training else blocks(x)
        return self.net["leave"](x)


class ReentrantNet(CheckpointedNet):
    """The same, by torch's older way, whose backward runs a backward pass inside."""

    reentrant = True


@pytest.mark.timeout(600, method="thread")  # modules that were called in backward waited for a turn for ever
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("module", [CheckpointedNet, ReentrantNet])
def test_backward_passes_that_come_back_equal_one_device(module: type[Net], num_stages: int) -> None:
    found = run(Case(module), ModelParallelStrategy(num_microbatches=3), devices=num_stages)
    assert_equal(found, baseline(Case(module)), 1e-10)


def scaled() -> Any:
    """float16 with a gradient scaler, on the CPU."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))


class Overflows(Net):
    """The gradient of its first stage overflows in step 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        factor = float("inf") if self.global_step == 0 and batch_idx == 0 else 1.0
        return loss + (self.net[0].weight * 0.0).sum() * factor


def test_gradient_scaler_skips_the_step_of_all_stages_when_one_overflows() -> None:
    case = Case(Overflows, dtype=torch.float32, num=4, trainer={"max_epochs": 1})
    before = torch.cat([p.detach().flatten() for p in make_module(case).parameters()]).double()
    plugin = scaled()
    assert torch.equal(run(case, Halves(), devices=2, plugins=[plugin]).weights, before)
    assert plugin.scaler.get_scale() == 32.0


def test_fit_leaves_no_hook_no_thread_and_no_graph_behind() -> None:
    module = make_module(DEEP)
    outputs: list[Any] = []
    module.net["leave"].register_forward_hook(lambda *args: outputs.append(weakref.ref(args[2])))
    trainer = fit(DEEP, module, Halves())
    assert not any(output() is not None for output in outputs)
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert not [thread for thread in threading.enumerate() if "stages" in thread.name]
    trainer.test(module, DEEP.loader(), verbose=False)


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and len(batch[0]) == 1:  # not while it is verified that it trains in parts
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


def test_a_failure_in_a_micro_batch_names_it() -> None:
    with pytest.raises(ValueError, match=r"broken \[micro-batch 2 of 2, 1 of 3 samples, on cpu\]"):
        run(Case(Fails, num=6, batch_size=3), Halves(), devices=2)


class TwoDevices(Net):
    """The classic module on two devices, placed by hand, which `auto` places otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.net = self.net, nn.Sequential()

    def configure_model(self) -> None:
        if len(self.net):
            return
        first, second = self.trainer.strategy.process_devices
        self.net, self.start = self.start, nn.Sequential()
        self.net[0].to(first)
        self.net[2].to(second)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.trainer.strategy.process_devices
        hidden = torch.tanh(self.net[0](x.to(first)))
        return self.net[2](hidden.to(second)).to(x.device)


def test_a_module_that_moves_its_layers_itself_equals_one_device_and_is_tested_after_fit() -> None:
    module, case = make_module(Case(TwoDevices)), Case()
    trainer = fit(case, module, Halves())
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert (weights - baseline(case).weights).abs().max() < 1e-10
    assert trainer.test(module, case.loader(), verbose=False)[0] == pytest.approx(baseline(case).tested, abs=1e-6)


def test_stock_trainer_takes_the_word_and_the_object() -> None:
    expected = baseline(Case())
    assert_equal(run(Case(), "model_parallel", pl.Trainer, devices=2), expected, 1e-10)
    assert_equal(run(Case(), ModelParallelStrategy(devices=["cpu", "cpu"]), pl.Trainer, devices=1), expected, 1e-10)
    ours = Trainer(strategy="model_parallel", devices=2, accelerator="cpu", logger=False)
    assert type(ours.strategy) is ModelParallelStrategy


def test_values_of_old_configurations_that_change_nothing_are_read() -> None:
    ModelParallelStrategy(overlap=None, profile_activations=False)
    DataParallelStrategy(model_parallel_size=1)
    BalancedDataParallelStrategy(objective="time")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "half"}, "partition=half is not allowed. Give auto or a list"),
        ({"partition": ["net.3"]}, r"Net has no module 'net\.3'; the nearest are net\.2"),
        ({"num_microbatches": 0}, "num_microbatches=0 is not allowed. Give a whole number >= 1"),
        ({"loss_reduction": "sum"}, "model_parallel: loss_reduction is no longer there. Leave it out"),
        ({"profile_activations": True}, "profile_activations is no longer there. Leave it out: set balance=time"),
        ({"balance": "time"}, "balance=time with num_microbatches=1"),
        ({"balance": "time", "num_microbatches": 2, "deterministic": True}, "Set num_microbatches=2 or more and"),
        ({"balance": "time", "num_microbatches": 2, "partition": ["net.1"]}, "says where the module is cut"),
        ({"device_weights": [1, 0]}, r"device_weights=\[1,0\] is not allowed. Give a list of numbers > 0"),
        ({"device_weights": [1, 1, 2]}, r"device_weights has 3 entries for 2 stages \(device_weights=\[1, 1, 2\]\)"),
    ],
)
def test_bad_options_are_refused_before_training(options: dict[str, Any], message: str) -> None:
    module = Net()
    with pytest.raises(ConfigError, match=message):
        fit(Case(), module, ModelParallelStrategy(**options))
    assert module.losses == []


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.* step flavor")
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
@pytest.mark.parametrize("strategy", [DDPStrategy, DataParallelStrategy, Halves])
def test_steps_that_read_their_own_batches_are_refused(strategy: Any, step: str) -> None:
    # Cause: without the loop's batch no share was read, so that ragged batches of ranks weighed the same.
    def reads(self: Any, dataloader_iter: Any) -> None:
        raise AssertionError("refused before")

    devices = 1 if strategy is DDPStrategy else 2
    with pytest.raises(ConfigError, match=rf"{step}\(dataloader_iter\) reads its own batches"):
        fit(Case(), type("Reads", (Net,), {step: reads})(), strategy(), devices=devices)


class Opaque:
    """No tensor, and nothing that can be cut."""


class ReadsTwo(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[:2], batch_idx) if isinstance(batch, list) else self.net[0].weight.sum()

    validation_step: Any = None


ROWS = torch.zeros(4, FEATURES)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([{"a": None}] * 2, r"a batch of type dict has no samples to split.*define __len__ and split"),
        # a first batch of one sample was a single micro-batch, and nothing was cut before the second step
        (
            [[ROWS[:1], ROWS[:1].sum(1).long(), Opaque()], [ROWS, ROWS.sum(1).long(), Opaque()]],
            r"batch\[2\] is a Opaque, which can't be cut into chunks",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The .* does not have many workers")
def test_batches_that_cannot_be_cut_are_refused_before_the_first_step(batches: Any, message: str) -> None:
    trainer = make_trainer(Case(), Halves(global_view=False), devices=2)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(ReadsTwo(), DataLoader(batches, batch_size=None))
    assert trainer.global_step == 0
