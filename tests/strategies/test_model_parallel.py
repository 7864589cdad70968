"""strategy=model_parallel: placement, micro-batches, parity beyond test_parity.py, and refusals."""

import logging
import threading
import weakref
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import Case, GroupsNet, Net, assert_equal, baseline, fit, make_module, run
from pytorch_lightning.plugins import MixedPrecision
from stage_modules import DEEP, DeepNet, SquareNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.strategies import ModelParallelStrategy, SingleDeviceStrategy
from evener.trainer import Trainer


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_deep_module_equals_one_device(num_stages: int, num_microbatches: int) -> None:
    found = run(DEEP, ModelParallelStrategy(num_microbatches=num_microbatches), devices=num_stages)
    assert_equal(found, baseline(DEEP), 1e-10)


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


class BranchedNet(Net):
    """Its first layer is used beside all others too: backward comes to stage 0 before it has left the last."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.net[0](x)[:, :3].tanh()


@pytest.mark.timeout(600, method="thread")  # modules that were called in backward waited for a turn for ever
@pytest.mark.parametrize(
    ("module", "num_stages", "output_device"),
    [(module, num, "last") for module in (CheckpointedNet, ReentrantNet) for num in (2, 3)]
    + [(BranchedNet, 2, "last"), (SquareNet, 2, "last"), (SquareNet, 2, "first")],
)
def test_backward_passes_that_come_back_equal_one_device(
    module: type[Net], num_stages: int, output_device: Any
) -> None:
    strategy = ModelParallelStrategy(num_microbatches=3, output_device=output_device)
    assert_equal(run(Case(module), strategy, devices=num_stages), baseline(Case(module)), 1e-10)


def scaled(dtype: torch.dtype = torch.float16) -> Any:
    """float16 with a gradient scaler, on the CPU."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))


@pytest.mark.parametrize("clip", [0.1, None])  # where clipping hides a scale
def test_gradient_scaler_equals_one_device(clip: float | None) -> None:
    case = Case(GroupsNet, dtype=torch.float32, num=22, trainer={"gradient_clip_val": clip})
    one = run(case, SingleDeviceStrategy(), devices=1, plugins=[scaled()])
    many = run(case, ModelParallelStrategy(num_microbatches=2), devices=2, plugins=[scaled()])
    assert (many.weights - one.weights).abs().max() < 2e-3  # of half precision
    assert (many.weights - baseline(case).weights).abs().max() < 2e-2


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
    assert torch.equal(
        run(case, ModelParallelStrategy(num_microbatches=2), devices=2, plugins=[plugin]).weights, before
    )
    assert plugin.scaler.get_scale() == 32.0


class NormNet(Net):
    """Batch statistics, which one sample has not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_no_micro_batch_of_one_sample_where_batches_are_normalised() -> None:
    # 3 samples in 3 micro-batches: 1 1 1 would fail; they are merged
    run(Case(NormNet, num=3, batch_size=3), ModelParallelStrategy(num_microbatches=3), devices=2)


def test_the_plan_is_told_once_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        module = make_module(DEEP)
        trainer = fit(DEEP, module, ModelParallelStrategy())
        trainer.test(module, DEEP.loader(), verbose=False)
    told = [record.getMessage() for record in caplog.records if "2 stages" in record.getMessage()]
    assert told == ["DeepNet in 2 stages: net.enter, net.blocks.0-1 on cpu | net.blocks.2-3, net.leave on cpu"]


def test_fit_leaves_no_hook_no_thread_and_no_graph_behind() -> None:
    module = make_module(DEEP)
    outputs: list[Any] = []
    module.net["leave"].register_forward_hook(lambda *args: outputs.append(weakref.ref(args[2])))
    trainer = fit(DEEP, module, ModelParallelStrategy(num_microbatches=2))
    assert not any(output() is not None for output in outputs)
    assert [len(part._forward_pre_hooks) for part in module.modules()] == [0] * len(list(module.modules()))
    assert not [thread for thread in threading.enumerate() if "replica" in thread.name]
    trainer.test(module, DEEP.loader(), verbose=False)


def test_a_failure_in_a_micro_batch_names_it() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1 and len(batch[0]) == 1:  # not while it is verified that it trains in parts
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"broken \[micro-batch 2 of 2, 1 of 3 samples, on cpu\]"):
        run(Case(Fails, num=6, batch_size=3), ModelParallelStrategy(num_microbatches=2), devices=2)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # Lightning's; here it is on purpose
def test_a_step_may_skip_the_whole_batch() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            """Nothing to remember of a batch without loss."""

    case = Case(Skips)
    found = [make_module(case) for _ in range(2)]
    fit(case, found[0], SingleDeviceStrategy(), devices=1)
    fit(case, found[1], ModelParallelStrategy(num_microbatches=2))
    for one, many in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-10)


class TwoDevices(Net):
    """The classic module on two devices, placed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential()

    def configure_model(self) -> None:
        if len(self.net):
            return
        first, second = self.trainer.strategy.process_devices
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.net[0].to(first)
        self.net[2].to(second)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.trainer.strategy.process_devices
        hidden = torch.tanh(self.net[0](x.to(first)))
        return self.net[2](hidden.to(second)).to(x.device)


def test_manual_placement_equals_one_device() -> None:
    class Given(TwoDevices):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_module(Case()).net

    module = Given().double()
    fit(Case(), module, ModelParallelStrategy(partition="manual", num_microbatches=2))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert (weights - baseline(Case()).weights).abs().max() < 1e-10


def test_manual_module_is_made_in_configure_model_and_tested_after_fit() -> None:
    torch.manual_seed(0)
    module, case = TwoDevices(), Case()
    trainer = fit(case, module, ModelParallelStrategy(partition="manual"))
    assert len(trainer.test(module, case.loader(), verbose=False)) == 1


def test_stock_trainer_takes_the_word_and_the_object() -> None:
    expected = baseline(Case())
    assert_equal(run(Case(), "model_parallel", pl.Trainer, devices=2), expected, 1e-10)
    assert_equal(run(Case(), ModelParallelStrategy(devices=["cpu", "cpu"]), pl.Trainer, devices=1), expected, 1e-10)
    assert type(Trainer(strategy="model_parallel", devices=2, accelerator="cpu", logger=False).strategy) is (
        ModelParallelStrategy
    )
