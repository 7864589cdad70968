"""Options of ddp, and shares by weights: the same training, and refusals in one sentence; blocks of devices."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, fit, outcome, quiet_trainer, trainer_of, weights
from torch import nn
from torch.utils.data import DataLoader

from evener.strategies import (
    BalancedDDPStrategy,
    ConfigError,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)
from evener.strategies.balance import ranks
from evener.trainer import Trainer

GLOBAL: dict[str, Any] = {"batch_size_is": "global", "timeout_s": 120}


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


def _fit_normed(strategy: pl.strategies.Strategy, devices: int) -> torch.Tensor:
    module = Normed()
    # 16 samples in batches of 7: the last has 2, so that a third rank has none
    quiet_trainer(strategy, devices).fit(module, DataLoader(Numbered(16), 7), DataLoader(Numbered(), 7))
    return torch.cat([value.detach().double().flatten() for value in module.state_dict().values()])


def test_synchronized_batchnorm_is_one_devices() -> None:
    single = _fit_normed(SingleDeviceStrategy(), 1)
    for state in run_ranks(_fit_normed, 3, DDPStrategy(sync_batchnorm=True, **GLOBAL), 3):
        torch.testing.assert_close(state, single, rtol=0, atol=1e-10)


def _fit_plain_and_in_parts() -> tuple[torch.Tensor, list[str]]:
    state, refused = _fit_normed(DDPStrategy(**GLOBAL), 2), list[str]()
    for kind, name in ((DDPStrategy, "devices_per_process"), (DDPModelParallelStrategy, "num_microbatches")):
        with pytest.raises(ConfigError) as error:
            _fit_normed(kind(sync_batchnorm=True, timeout_s=120, **{name: 2}), 4)
        refused.append(str(error.value))
    return state, refused


def test_plain_batchnorm_trains_on_ranks_and_synchronized_is_refused_where_a_process_has_parts() -> None:
    # Ranks summed the statistics of one part at a time: weights were 0.27 away from one device's, without a word.
    (first, refused), (second, _) = run_ranks(_fit_plain_and_in_parts, 2)
    assert first.isfinite().all()
    torch.testing.assert_close(first[:16], second[:16], rtol=0, atol=0)  # parameters of the first layers
    assert refused[0].startswith("ddp: devices_per_process=2 and sync_batchnorm=True: ")
    assert refused[1].startswith("ddp_model_parallel: num_microbatches=2 and sync_batchnorm=True: ")


ACCUMULATED: dict[str, Any] = {"trainer": {"accumulate_grad_batches": 3}}
CLIPPED: dict[str, Any] = {"trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}
STATIC: dict[str, Any] = {"static_graph": True, **GLOBAL}
EXACT: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "unused": (lambda: DDPStrategy(find_unused_parameters=True, bucket_cap_mb=1, **GLOBAL), 2, {}),
    # torch's wrapper records the graph in its first backward pass, which accumulation did not reduce
    "static view, accumulated": (lambda: DDPStrategy(gradient_as_bucket_view=True, **STATIC), 2, ACCUMULATED),
    "weights": (lambda: BalancedDDPStrategy([3, 1], timeout_s=120), 2, {}),
    "none for rank 1": (lambda: BalancedDDPStrategy([1, 0], timeout_s=120), 2, {}),
    "two devices each, accumulated": (lambda: DDPStrategy(devices_per_process=2, **GLOBAL), 4, CLIPPED),
}
LOSSY = ("fp16", "bf16", "powersgd")


def _train_all() -> dict[str, Any]:
    found = {name: outcome(*fit(make(), devices, 6, case)) for name, (make, devices, case) in EXACT.items()}
    for name in LOSSY:
        found[name] = outcome(*fit(DDPStrategy(compression=name, **GLOBAL), 2, 6, {}))
    return found


def test_options_and_shares_do_not_change_training() -> None:
    by_rank = run_ranks(_train_all, 2)
    single = outcome(*fit(SingleDeviceStrategy(), 1, 6, {}))["weights"]
    for name, (_, _, case) in EXACT.items():
        expected = outcome(*fit(SingleDeviceStrategy(), 1, 6, case))
        for found in by_rank:
            torch.testing.assert_close(found[name]["weights"], expected["weights"], rtol=0, atol=1e-10, msg=name)
            assert found[name]["metrics"] == pytest.approx(expected["metrics"], abs=1e-12), name
    for name in LOSSY:
        torch.testing.assert_close(by_rank[0][name]["weights"], single, rtol=0, atol=0.1, msg=name)
        assert not torch.equal(by_rank[0][name]["weights"], single), "nothing was compressed"
    sizes = [[len(batch) for batch in found["weights"]["trained"]][:3] for found in by_rank]
    assert sizes == [[5, 5, 5], [1, 1, 1]]  # 3/4 of 6 is 4.5; the tie goes first


def _measure() -> dict[str, Any]:
    strategy = BalancedDDPStrategy("auto", timeout_s=120)
    pl.seed_everything(7, verbose=False)
    module = Net()
    trainer = quiet_trainer(strategy, 2, max_epochs=12)

    def known_mark(_: Any) -> float:
        """What a clock would show if rank 0 needed three times as long for a sample; no other work disturbs it."""
        return sum(map(len, module.trained)) * (0.003 if module.global_rank == 0 else 0.001)

    ranks.time_mark = known_mark  # in this process, which ends with the test
    trainer.fit(module, DataLoader(Numbered(24), 12))
    assert strategy.balance.controller is not None
    quiet_trainer(DDPStrategy(timeout_s=120), 2).fit(unused := Unused(), DataLoader(Numbered(), 3))
    with pytest.raises(RuntimeError, match=r"took no part in the loss: spare.weight, spare.bias\."):
        quiet_trainer(DDPStrategy(find_unused_parameters=False, **GLOBAL), 2).fit(Unused(), DataLoader(Numbered(), 3))
    found = {"shares": strategy.balance.controller.shares, "unused steps": unused.trainer.global_step}
    return found | outcome(module, trainer)


def test_shares_are_measured() -> None:
    first, second = run_ranks(_measure, 2)
    assert first["shares"] == second["shares"]
    assert first["shares"][0] == pytest.approx(1 / 4, abs=0.02)
    sizes = [(len(a), len(b)) for a, b in zip(first["trained"], second["trained"], strict=True)]
    assert all(a + b == 12 for a, b in sizes)
    assert (sizes[0], sizes[-1]) == ((6, 6), (3, 9))
    pl.seed_everything(7, verbose=False)
    module = Net()
    trainer_of("single", max_epochs=12).fit(module, DataLoader(Numbered(24), 12))
    torch.testing.assert_close(first["weights"], weights(module), rtol=0, atol=1e-10)
    assert first["unused steps"] == second["unused steps"] == 8  # they were found to be unused before the first step


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DDPStrategy, {"batch_size_is": "each"}, r"batch_size_is=each is not allowed. Give per_device or global"),
        (DDPStrategy, {"compression": "zip"}, r"compression=zip is not allowed. Give fp16, bf16, powersgd or null"),
        (DDPStrategy, {"find_unused": True}, r"find_unused is unknown; choose from .*find_unused_parameters"),
        (DDPStrategy, {"static_graph": True, "find_unused_parameters": True}, r"were both given"),
        (DDPStrategy, {"static_graph": True, "devices_per_process": 2}, r"recorded with devices_per_process=2"),
        (BalancedDDPStrategy, {"batch_size_is": "per_device"}, "batch_size_is=per_device was given"),
        (BalancedDDPStrategy, {"weights": "fast"}, "weights=fast is not allowed. Give a list of numbers or auto"),
        (FSDPStrategy, {"shard": "all"}, r"fsdp: shard=all is not allowed. Give auto or a list"),
        (FSDPStrategy, {"replicas": 0}, r"fsdp: replicas=0 is not allowed. Give a whole number >= 1"),
        (FSDPStrategy, {"static_graph": True}, r"fsdp: static_graph is unknown; choose from batch_size_is,"),
        (FSDPStrategy, {"weights": [3, 1]}, r"weights divide a global batch, but batch_size_is=per_device"),
    ],
)
def test_what_cannot_be_honoured_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


class Lazy(Net):
    """Its layers find their shapes at the first call, which its hook `setup` makes if that is asked for."""

    def __init__(self, in_setup: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)).double()
        self.in_setup = in_setup

    def setup(self, stage: str) -> None:
        if self.in_setup:
            self.net(torch.zeros(1, 3, dtype=torch.float64))


class Scripted(Net):
    """With a layer of TorchScript, whose parameters nobody can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.jit.script(self.net[0])


SHAPELESS = r"Parameter net\.0\.weight has no shape yet.* Run one forward before fit"
SCRIPTED = r"net\.0 is compiled by TorchScript .* can't be copied or cut"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "strategy", "told"),
    [
        # Torch's errors told of a class that the user does not know; shapes found in the ranks' `setup` could not be
        # brought back to the script, which lost all that was trained.
        (Lazy, DataParallelStrategy, SHAPELESS),
        (lambda: Lazy(in_setup=True), DDPStrategy, SHAPELESS),
        (Scripted, FSDPStrategy, SCRIPTED),
    ],
)
def test_layers_that_can_not_be_copied_or_cut_are_refused_before_ranks_start(
    make: Any, strategy: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        quiet_trainer(strategy(), 2).fit(make(), DataLoader(Numbered(6), 3))


class Alternating(Unused):
    """Steps one of two optimizers by hand, of which the other's parameters take no part."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(((self.net(batch[0]) - batch[1]) ** 2).mean())
        self.optimizers().step()
        self.optimizers().zero_grad()


def _fit_alone(module: type[Net], strategy: Any) -> torch.Tensor:
    made = module()
    quiet_trainer(strategy(), 1).fit(made, DataLoader(Numbered(16), 4))
    return weights(made)


@pytest.mark.parametrize("module", [Unused, Alternating])
def test_a_lone_rank_needs_no_option_for_parameters_without_a_gradient(module: type[Net]) -> None:
    # Failed before: a single rank verifies nothing, so that its wrapper was not told.
    [found] = run_ranks(_fit_alone, 1, module, DDPStrategy)
    torch.testing.assert_close(found, _fit_alone(module, SingleDeviceStrategy), rtol=0, atol=1e-12)


class Local(DDPModelParallelStrategy):
    """As rank `local` of a node."""

    local = 0

    @property
    def local_rank(self) -> int:
        return self.local


@pytest.mark.parametrize(
    ("num_devices", "size", "blocks"),
    [(8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]), (6, 3, [[0, 1, 2], [3, 4, 5]])],
)
def test_each_rank_owns_its_block(num_devices: int, size: int, blocks: list[list[int]]) -> None:
    strategy = Local(model_parallel_size=size)
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(num_devices)]
    assert strategy.num_processes == len(blocks)
    for strategy.local, block in enumerate(blocks):
        assert [device.index for device in strategy.process_devices] == block
        assert strategy.root_device == torch.device("cuda", block[0])
    assert strategy.determine_ddp_device_ids() is None


def test_indivisible_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="7 devices don't divide into processes of 2 devices"):
        DDPModelParallelStrategy.count_processes(7, model_parallel_size=2, num_microbatches=4)
    assert DDPModelParallelStrategy.count_processes(8) == 4
    with pytest.raises(ConfigError, match="3 devices don't divide into processes of 2 devices"):
        Trainer(strategy="ddp_model_parallel", devices=3, accelerator="cpu", logger=False)


def test_what_the_wrapper_can_not_reduce_is_refused() -> None:
    strategy = Local(num_microbatches=2, static_graph=True)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    with pytest.raises(ConfigError, match="ddp_model_parallel: static_graph=true needs one backward pass per step"):
        strategy.setup(Trainer(accelerator="cpu", devices=1, logger=False))
