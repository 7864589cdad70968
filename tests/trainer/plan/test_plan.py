"""mode=plan: bytes worked out by hand for a small module, and what a real run allocates.

The module is Linear(4, 8), ReLU, Linear(8, 2) with cross entropy and SGD with momentum, in float32, on n samples:

    parameters                                        (4*8 + 8 + 8*2 + 2) * 4 = 232 bytes; gradients and momentum, too
    batch: 4 floats and an int64 per sample           16n + 8n = 24n
    left by forward: output of ReLU 32n, log-probabilities 8n, loss 4, sum of class weights 4
    most in forward, when ReLU has its input (32n) and makes its output (32n):    3*232 + 24n + 64n
    in backward there are three scalars (loss, what is reported of it, its gradient), and either
        ReLU's gradient (32n) is made from that of its output (32n) and its output (32n), and of the gradients of
        parameters there are those of the last layer, 72 bytes:                   2*232 + 24n + 96n + 72 + 12
        or ReLU's gradient (32n) becomes those of the first layer, the last ones: 2*232 + 24n + 32n + 232 + 12
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from seen import command
from tiny import Tiny, quiet
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError, SingleDeviceStrategy
from evener.trainer import compose
from evener.trainer.cli.train import prepare
from evener.trainer.plan._topology import StageMemory, in_flight
from evener.trainer.plan.plan import DevicePlan, plan_memory

WEIGHTS = 232


def forward_peak(n: int) -> int:
    return 3 * WEIGHTS + 88 * n


def backward_peak(n: int) -> int:
    return 2 * WEIGHTS + max(120 * n + 84, 56 * n + WEIGHTS + 12)


class Small(Tiny):
    def __init__(self, batch_size: int = 5) -> None:
        super().__init__()
        del self.layer
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        num = max(40, self.batch_size)
        samples = TensorDataset(torch.randn(num, 4), torch.zeros(num, dtype=torch.int64))
        return DataLoader(samples, batch_size=self.batch_size)


class Curious(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else loss * 2


def small(tmp_path: Path, *overrides: str, module: str = "Small", **options: Any) -> DictConfig:
    cfg = compose(["mode=plan", f"log_dir={tmp_path}", "accelerator=cpu", "data=none", *overrides])
    cfg.module = {"_target_": f"{__name__}.{module}", **options}
    return prepare(cfg)


def test_one_device_needs_what_the_hand_says(tmp_path: Path) -> None:
    plan = plan_memory(small(tmp_path))
    assert plan.devices == [
        DevicePlan(0, 5, WEIGHTS, WEIGHTS, WEIGHTS, batch=5 * 24, activations=5 * 40 + 8, peak=backward_peak(5))
    ]
    assert (plan.loader_batch, plan.global_batch, plan.largest_batch) == (5, 5, None)
    assert forward_peak(4) > backward_peak(4)
    assert plan_memory(small(tmp_path, batch_size=4)).peak == forward_peak(4)


@pytest.mark.parametrize("samples", [1, 12])
def test_the_largest_batch_fits_and_one_more_does_not(samples: int, tmp_path: Path) -> None:
    limit = max(forward_peak(samples), backward_peak(samples)) + 80
    assert plan_memory(small(tmp_path, f"device_memory_gb={limit / 1e9}")).largest_batch == samples


def test_ranks_have_buckets_and_the_loaders_batch_or_share_it(tmp_path: Path) -> None:
    plan = plan_memory(small(tmp_path, "strategy=ddp", "devices=4"))
    assert [device.samples for device in plan.devices] == [5, 5, 5, 5]
    assert {device.communication for device in plan.devices} == {WEIGHTS}
    assert {device.peak for device in plan.devices} == {backward_peak(5) + WEIGHTS}
    assert plan.global_batch == 20
    plan = plan_memory(small(tmp_path, "strategy=ddp", "devices=4", "strategy.batch_size_is=global"))
    assert [device.peak for device in plan.devices] == [forward_peak(n) + WEIGHTS for n in (2, 1, 1, 1)]
    assert plan.global_batch == 5


def test_the_root_of_replicas_hosts_the_optimizer_and_receives_gradients(tmp_path: Path) -> None:
    root, *others = plan_memory(small(tmp_path, "strategy=dp", "devices=3", batch_size=8)).devices
    # 8 = 3 + 3 + 2 samples; two replicas send 232 bytes each
    assert root == DevicePlan(0, 3, WEIGHTS, WEIGHTS, WEIGHTS, 72, 128, 2 * WEIGHTS, peak=5 * WEIGHTS + 72)
    # without optimizer; their gradients were sent, so that forward has none
    assert [d.optimizer for d in others] == [0, 0]
    assert [d.peak for d in others] == [max(forward_peak(n) - 2 * WEIGHTS, backward_peak(n) - WEIGHTS) for n in (3, 2)]


def test_a_root_without_samples_hosts_only(tmp_path: Path) -> None:
    options = ["strategy=balanced_dp", "devices=2", "strategy.gpu0_chunk=0", "strategy.weights=null"]
    root, other = plan_memory(small(tmp_path, *options)).devices
    assert root == DevicePlan(0, 0, WEIGHTS, WEIGHTS, WEIGHTS, communication=WEIGHTS, peak=4 * WEIGHTS)
    assert other.samples == 5


SPLIT = ["strategy.partition=[net.2]"]


def test_stages_hold_their_own_parts(tmp_path: Path) -> None:
    first, last = plan_memory(small(tmp_path, "strategy=model_parallel", "devices=2", *SPLIT)).devices
    # the batch is on the last stage; the images' copy on the first is kept for the backward pass
    assert (first.parameters, first.gradients, first.optimizer, first.batch) == (160, 160, 160, 0)
    assert (last.parameters, last.gradients, last.optimizer, last.batch) == (72, 72, 72, 120)
    assert first.activations == 5 * 16 + 5 * 32
    assert last.activations == 5 * 32 + 5 * 8 + 8  # a copy of the first stage's output, log-probabilities, loss, weight
    plan = plan_memory(small(tmp_path, "strategy=ddp_model_parallel", "devices=4", *SPLIT))
    assert [(device.parameters, device.communication) for device in plan.devices] == [(160, 160), (72, 72)] * 2
    assert plan.global_batch == 10


def test_accumulated_gradients_are_there_in_backward(tmp_path: Path) -> None:
    cfg = small(tmp_path, "trainer.accumulate_grad_batches=3")
    # the second backward pass finds the first one's gradients, and makes those of the last layer anew (72 bytes)
    assert plan_memory(cfg).peak >= backward_peak(5) + WEIGHTS - 72


def test_accelerators_count_whole_blocks_and_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = ["mode=plan", "accelerator=gpu", "devices=8", "strategy=ddp", "data=none", "+module.batch_size=5"]
    small_module = [f"module._target_={__name__}.Small", "~module.lr", "~module.hidden", "~module.channels"]
    where = [f"log_dir={tmp_path}", "~module.weight_decay", "device_memory_gb=1e-6"]
    assert command(monkeypatch, *arguments, *small_module, *where) == ""
    shown = " ".join(capsys.readouterr().out.split())
    assert "strategy=ddp, global batch 40 = 8 ranks × 5 samples" in shown
    # four parameters, a block of 512 bytes each
    assert "│ 0 to 7 │ 5 │ 2.05 kB │ 2.05 kB │ 2.05 kB │ 1.02 kB │ 2.05 kB │ 2.05 kB │" in shown
    assert "This does not fit 1.00 kB" in shown
    assert "The devices measured" not in shown


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x).tanh(), 0.1, self.training))


class Deep(Small):
    def __init__(self, batch_size: int = 5, num_blocks: int = 8) -> None:
        super().__init__(batch_size)
        self.net = nn.Sequential(*(Wide() for _ in range(num_blocks)), nn.Linear(4, 2))


class Watch(pl.Callback):
    """Counts the bytes that the last step takes from the allocator."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True).__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.profile.__exit__(None, None, None)

    def most(self) -> int:
        """The most bytes beyond those at the beginning of the step."""
        kineto: Any = self.profile.profiler
        events = sorted(kineto.kineto_results.events(), key=lambda event: event.start_ns())
        return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize(
    ("module", "recompute", "most"),
    [(Small, "never", 1e6), (Deep, "always", 2e6), (Deep, "except_last", 2e6)],
)
def test_the_plan_is_within_a_tenth_of_what_a_run_allocates(
    module: type[Small], recompute: Any, most: float, tmp_path: Path
) -> None:
    plan = plan_memory(small(tmp_path, f"strategy.recompute={recompute}", module=module.__name__, batch_size=2000))
    assert plan.peak < most

    watch = Watch()
    strategy = SingleDeviceStrategy(recompute=recompute)
    quiet(strategy=strategy, callbacks=[watch], max_epochs=3).fit(module(batch_size=2000))
    # the profiled step began with parameters, gradients, momentum and the batch
    (device,) = plan.devices
    assert plan.peak == pytest.approx(3 * device.parameters + 2000 * 24 + watch.most(), rel=0.1)


def test_ranks_hold_shards_of_everything(tmp_path: Path) -> None:
    # rows of 4, 1, 8 and 1 floats: 8, 8, 2, 2 of them, of which a rank of three has at most 3, 3, 1, 1
    for num, size in ((2, WEIGHTS // 2), (3, 4 * (3 * 4 + 3 + 8 + 1))):
        plan = plan_memory(small(tmp_path, "strategy=fsdp", f"devices={num}"))
        assert {(d.parameters, d.gradients, d.optimizer) for d in plan.devices} == {(size, size, size)}
        assert [d.samples for d in plan.devices] == [5] * num
        # the parts are the two linear layers, the first with 160 bytes
        assert {d.communication for d in plan.devices} == {3 * 160}
        # the step's largest tensors, with the gradients of the parts in place of all
        assert 3 * size + 5 * 24 + 5 * 40 < plan.peak < 3 * size + 5 * 24 + 5 * 120 + 5 * 160


def test_a_stage_keeps_micro_batches_by_the_schedule() -> None:
    step = StageMemory(parameters=10, gradients=9, batch=4, activations=100, forward=107, backward=127)
    # 7 samples in micro-batches of at most 2, of which the stage keeps 3
    (found,) = in_flight([step], [3], 7, 2)
    assert (found.batch, found.activations) == (14, 300)
    assert (found.forward, found.backward) == (107 + 200, 127 + 200 + 9)
    assert found.peak == 19 + 14 + 127 + 209


def test_what_does_not_fit_is_told_with_what_needs_less(tmp_path: Path) -> None:
    # the parameters alone, with their gradients and the optimizer's state
    plan = plan_memory(small(tmp_path, f"device_memory_gb={3 * WEIGHTS / 1e9}"))
    assert plan.largest_batch == 0
    told, largest = plan.conclusions()
    assert told.endswith("strategy.recompute=except_last, fsdp and model_parallel need less per device.")
    assert "A batch of one sample does not fit 696 B" in largest


REFUSED = [
    (["strategy=dp", "devices=2", "strategy.submodule=net"], r"mode=plan does not support dp\.submodule"),
    (["strategy=ddp", "devices=2", "strategy.shard_optimizer=true"], r"does not support ddp\.shard_optimizer"),
    (["strategy._target_=pytorch_lightning.strategies.FSDPStrategy"], r"does not support the strategy fsdp"),
    (["module._target_=test_plan.Curious"], r"mode=plan runs training_step with shapes only.*mode=compare"),
    (["plan.measure=true"], r"plan\.measure is no longer there\. Give mode=compare"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED, ids=[" ".join(given) for given, _ in REFUSED])
def test_what_cannot_be_planned_is_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    module = "Curious" if "Curious" in overrides[0] else "Small"
    with pytest.raises(ConfigError, match=sentence):
        plan_memory(small(tmp_path, *overrides, module=module))
