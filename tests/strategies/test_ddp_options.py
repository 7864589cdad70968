"""DDP's options, and shares by weights: the same training, and refusals in one sentence."""

import logging
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, fit, outcome, quiet_trainer, weights
from torch import nn
from torch.utils.data import DataLoader

from evener.strategies import (
    BalancedDDPStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.strategies.balance.ranks import RankTimer
from evener.strategies.distributed.sync_batchnorm import SyncBatchNorm

EXACT: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    "unused": {"find_unused_parameters": True},
}
LOSSY: dict[str, dict[str, Any]] = {name: {"compression": name} for name in ("fp16", "bf16", "powersgd")}


class Unused(Net):
    """With a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2).double()


class Normed(Net):
    """With BatchNorm, whose statistics are of the global batch when they are synchronized."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # a bias before BatchNorm has no gradient but rounding errors, which Adam would blow up
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def state(self) -> torch.Tensor:
        return torch.cat([value.detach().double().flatten() for value in self.state_dict().values()])


def fit_normed(strategy: pl.strategies.Strategy, devices: int, batch_size: int) -> torch.Tensor:
    module = Normed()
    # 16 samples in batches of 7: the last has 2, so that the third rank has none
    quiet_trainer(strategy, devices).fit(module, DataLoader(Numbered(16), batch_size), DataLoader(Numbered(), 7))
    return module.state()


def _train_normed(ranks: int, **options: Any) -> torch.Tensor:
    return fit_normed(DDPStrategy(batch_size_is="global", timeout_s=120, **options), ranks, 7)


def test_synchronized_batchnorm_is_one_devices() -> None:
    single = fit_normed(SingleDeviceStrategy(), 1, 7)
    for state in run_ranks(partial(_train_normed, sync_batchnorm=True), 3, 3):
        torch.testing.assert_close(state, single, rtol=0, atol=1e-10)


def _refusals() -> list[str]:
    refused: list[str] = []
    for strategy in (
        DDPStrategy(devices_per_process=2, sync_batchnorm=True, timeout_s=120),
        DDPModelParallelStrategy(num_microbatches=2, sync_batchnorm=True, timeout_s=120),
    ):
        with pytest.raises(ConfigError) as error:
            fit_normed(strategy, 4, 7)
        refused.append(str(error.value))
    return refused


def test_synchronized_batchnorm_is_refused_where_a_process_has_its_batch_in_parts() -> None:
    # Ranks summed the statistics of one part at a time: weights were 0.27 away from one device's, without a word.
    for replicas, microbatches in run_ranks(_refusals, 2):
        assert replicas.startswith("ddp: devices_per_process=2 and sync_batchnorm=True: ")
        assert replicas.endswith("Set devices_per_process=1, or sync_batchnorm=False.")
        assert microbatches.startswith("ddp_model_parallel: num_microbatches=2 and sync_batchnorm=True: ")
        assert microbatches.endswith("Set num_microbatches=1, or sync_batchnorm=False.")


def test_a_cumulative_average_of_statistics_is_plain_batchnorms() -> None:
    layer = nn.BatchNorm1d(3, momentum=None).double()
    SyncBatchNorm().apply(layer)
    mean, variance = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    for i in range(4):
        layer._track(mean[i], variance[i])  # type: ignore[operator]
    torch.testing.assert_close(layer.running_mean, mean.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, variance.mean(0), rtol=0, atol=1e-12)


def test_plain_batchnorm_trains_where_a_rank_has_no_sample() -> None:
    first, second = run_ranks(_train_normed, 2, 2)
    assert first.isfinite().all()
    torch.testing.assert_close(first[:16], second[:16], rtol=0, atol=0)  # parameters of the first layers


def known_seconds(timer: Any) -> float:
    """What a clock would show if rank 0 needed three times as long for a sample; no other work disturbs it."""
    module = timer.module
    return len(module.trained[-1]) * (0.003 if module.global_rank == 0 else 0.001)


def _train_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {**EXACT, **LOSSY}.items():
        strategy = DDPStrategy(batch_size_is="global", timeout_s=120, **options)
        found[name] = outcome(*fit(strategy, 2, 6, {}))
    for name, shares in (("weights", [3, 1]), ("none for rank 1", [1, 0])):
        found[name] = outcome(*fit(BalancedDDPStrategy(shares, timeout_s=120), 2, 6, {}))
    found["two devices each"] = outcome(
        *fit(DDPStrategy(batch_size_is="global", devices_per_process=2, timeout_s=120), 4, 6, {})
    )
    accumulated = {"trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}
    strategy = DDPStrategy(batch_size_is="global", devices_per_process=2, timeout_s=120)
    found["two devices each, accumulated"] = outcome(*fit(strategy, 4, 6, accumulated))
    found["lines"] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found["lines"].append(record.getMessage())

    logging.getLogger("pytorch_lightning.utilities.rank_zero").addHandler(Keep())
    strategy = BalancedDDPStrategy("auto", timeout_s=120)
    pl.seed_everything(7, verbose=False)
    RankTimer.seconds = known_seconds  # type: ignore[method-assign]  # in this process, which ends with the test
    module = Net()
    trainer = quiet_trainer(strategy, 2, max_epochs=12)
    trainer.fit(module, DataLoader(Numbered(24), 12))
    assert strategy.controller is not None
    found["auto"] = {**outcome(module, trainer), "shares": strategy.controller.shares}
    fit(DDPStrategy(timeout_s=120), 2, 3, {})
    trainer = quiet_trainer(DDPStrategy(timeout_s=120), 2)
    trainer.fit(Unused(), DataLoader(Numbered(), 2))
    found["unused steps"] = trainer.global_step
    return found


def _accumulate_in_a_static_graph() -> list[torch.Tensor]:
    found = []
    for more in ({}, {"gradient_as_bucket_view": True}):
        strategy = DDPStrategy(batch_size_is="global", static_graph=True, timeout_s=120, **more)
        found.append(outcome(*fit(strategy, 2, 6, ACCUMULATED))["weights"])
    return found


ACCUMULATED: dict[str, Any] = {"trainer": {"accumulate_grad_batches": 3}}


def test_a_static_graph_accumulates() -> None:
    """Cause: torch's wrapper records the graph in its first backward pass, which accumulation did not reduce."""
    single = outcome(*fit(SingleDeviceStrategy(), 1, 6, ACCUMULATED))["weights"]
    for found in (one for rank in run_ranks(_accumulate_in_a_static_graph, 2, timeout_s=200) for one in rank):
        torch.testing.assert_close(found, single, rtol=0, atol=1e-10)


def test_options_and_shares_do_not_change_training() -> None:
    by_rank = run_ranks(_train_all, 2, timeout_s=300)
    single = outcome(*fit(SingleDeviceStrategy(), 1, 6, {}))["weights"]
    for found in by_rank:
        for name in (*EXACT, "weights", "none for rank 1", "two devices each"):
            torch.testing.assert_close(found[name]["weights"], single, rtol=0, atol=1e-10, msg=name)
        accumulated = {"trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}
        alone = outcome(*fit(SingleDeviceStrategy(), 1, 6, accumulated))
        several = found["two devices each, accumulated"]
        torch.testing.assert_close(several["weights"], alone["weights"], rtol=0, atol=1e-10)
        assert several["metrics"] == pytest.approx(alone["metrics"], abs=1e-12)
        for name in LOSSY:
            torch.testing.assert_close(found[name]["weights"], single, rtol=0, atol=0.1, msg=name)
            assert not torch.equal(found[name]["weights"], single), "nothing was compressed"
    first, second = by_rank
    assert [len(batch) for batch in first["weights"]["trained"]][:3] == [5, 5, 5]  # 3/4 of 6 is 4.5; the tie goes first
    assert [len(batch) for batch in second["weights"]["trained"]][:3] == [1, 1, 1]

    shares = first["auto"]["shares"]
    assert shares == second["auto"]["shares"]
    assert shares[0] == pytest.approx(1 / 4, abs=0.02)
    sizes = [(len(a), len(b)) for a, b in zip(first["auto"]["trained"], second["auto"]["trained"], strict=True)]
    assert all(a + b == 12 for a, b in sizes)
    assert sizes[0] == (6, 6)
    assert sizes[-1] == (3, 9)
    pl.seed_everything(7, verbose=False)
    module = Net()
    quiet_trainer(SingleDeviceStrategy(), max_epochs=12).fit(module, DataLoader(Numbered(24), 12))
    torch.testing.assert_close(first["auto"]["weights"], weights(module), rtol=0, atol=1e-10)

    assert "global batch 12 = 2 ranks × 6 samples" in first["lines"]
    assert "global batch 6 = 2 ranks × 3 samples" in first["lines"]
    for found in by_rank:
        assert found["unused steps"] > 1  # which were found to be unused before the first step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, r"ddp: timeout_s=0 is not allowed. Give a number > 0"),
        ({"batch_size_is": "each"}, r"batch_size_is=each is not allowed. Give per_device or global"),
        ({"devices_per_process": 0}, r"devices_per_process=0 is not allowed. Give a whole number >= 1"),
        ({"compression": "zip"}, r"compression=zip is not allowed. Give fp16, bf16, powersgd or null"),
        ({"find_unused": True}, r"find_unused is unknown; choose from .*find_unused_parameters"),
        ({"static_graph": True, "find_unused_parameters": True}, r"were both given"),
        ({"static_graph": True, "devices_per_process": 2}, r"can't be recorded with devices_per_process=2"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DDPStrategy(**options)


def test_balanced_refuses_what_it_cannot_divide() -> None:
    with pytest.raises(ConfigError, match="batch_size_is=per_device was given"):
        BalancedDDPStrategy(batch_size_is="per_device")
    with pytest.raises(ConfigError, match=r"weights=fast is not allowed. Give a list of numbers or auto"):
        BalancedDDPStrategy("fast")  # type: ignore[arg-type]


class Lazy(Net):
    """Its layers find their shapes at the first call, which its hook `setup` makes if that is asked for."""

    def __init__(self, in_setup: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)).double()
        self.in_setup = in_setup

    def setup(self, stage: str) -> None:
        if self.in_setup:
            self.net(torch.zeros(1, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("strategy", "in_setup"),
    [(DDPStrategy, False), (DDPStrategy, True), (FSDPStrategy, True), (DataParallelStrategy, False)],
)
def test_layers_without_a_shape_are_refused_before_ranks_start(strategy: Any, in_setup: bool) -> None:
    # Torch's errors told of a class that the user does not know; shapes found in the ranks' `setup` could not be
    # brought back to the script, which lost all that was trained.
    with pytest.raises(ConfigError, match=r"Parameter net\.0\.weight has no shape yet.* Run one forward before fit"):
        quiet_trainer(strategy(), 2).fit(Lazy(in_setup), DataLoader(Numbered(6), 3))


class Scripted(Net):
    """With a layer of TorchScript, whose parameters nobody can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.jit.script(self.net[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "strategy", [FSDPStrategy, lambda: FSDPStrategy([]), DataParallelStrategy, ModelParallelStrategy]
)
def test_torchscript_is_refused_where_it_would_be_copied_or_cut(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"net\.0 is compiled by TorchScript .* can't be copied or cut"):
        quiet_trainer(strategy(), 2).fit(Scripted(), DataLoader(Numbered(6), 3))


class Alternating(Net):
    """Steps one of two optimizers by hand, of which the other's parameters take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2).double()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(((self.net(batch[0]) - batch[1]) ** 2).mean())
        self.optimizers().step()
        self.optimizers().zero_grad()


@pytest.mark.parametrize("module", [Unused, Alternating])
def test_a_lone_rank_needs_no_option_for_parameters_without_a_gradient(module: type[Net]) -> None:
    # Failed before: a single rank verifies nothing, so that its wrapper was not told.
    [found] = run_ranks(_fit_alone, 1, module, DDPStrategy)
    torch.testing.assert_close(found, _fit_alone(module, SingleDeviceStrategy), rtol=0, atol=1e-12)


def _fit_alone(module: type[Net], strategy: Any) -> torch.Tensor:
    made = module()
    quiet_trainer(strategy(), 1).fit(made, DataLoader(Numbered(16), 4))
    return weights(made)
