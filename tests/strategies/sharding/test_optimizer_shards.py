"""Each rank keeps the optimizer state of some parameters; weights are those of whole optimizers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, outcome, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, DDPStrategy, SingleDeviceStrategy
from evener.strategies.sharding.optimizer_shards import ELEMENTWISE, owners

OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, foreach=False),
}


class Deep(Net):
    """Of eight layers, with a scheduler that counts the optimizer's steps."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        layers = [layer for _ in range(7) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(3, 16), *layers, nn.Linear(16, 1)).double()
        self.optimizer = optimizer
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters()]
        self.norms.append(float(torch.stack([grad.norm() for grad in grads if grad is not None]).norm()))

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Two(Deep):
    """Two optimizers by hand, one of which is used every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.net[:4], self.net[4:])]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()
    )


def train(strategy: Any, devices: int, module: Deep, path: Path | None = None, **options: Any) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    checkpoint = options.pop("ckpt_path", None)
    trainer = quiet_trainer(strategy, devices, **options)
    trainer.fit(module, DataLoader(Numbered(), 6), ckpt_path=checkpoint)
    if path is not None:
        trainer.save_checkpoint(path)
    bytes_of = sum(state_bytes(optimizer) for optimizer in trainer.optimizers)
    return {**outcome(module, trainer), "bytes": bytes_of, "norms": module.norms}


def _both(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in (
        ("plain", {}), ("clipped", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}), ("two", {}),
    ):  # fmt: skip
        for sharded in (False, True):
            strategy = DDPStrategy("global", shard_optimizer=sharded, timeout_s=60)
            module = Two() if name == "two" else Deep()
            found[name, sharded] = train(strategy, 2, module, Path(folder) / f"{name}-{sharded}.ckpt", **options)
    for name in OPTIMIZERS:
        for sharded in (False, True):
            strategy = DDPStrategy("global", shard_optimizer=sharded, timeout_s=60)
            found[name, sharded] = train(strategy, 2, Deep(name), max_epochs=1)
    path = Path(folder) / "plain-True.ckpt"
    more = DDPStrategy("global", shard_optimizer=True, timeout_s=60)
    found["resumed"] = train(more, 2, Deep(), ckpt_path=path, max_epochs=3)
    return found


def test_sharded_optimizers_give_the_weights_of_whole_ones_and_half_the_state(tmp_path: Path) -> None:
    by_rank = run_ranks(_both, 2, str(tmp_path), timeout_s=300)
    for found in by_rank:
        for name in ("plain", "clipped", "two", *OPTIMIZERS):
            whole, cut = found[name, False], found[name, True]
            assert torch.equal(whole["weights"], cut["weights"]), name
            assert cut["bytes"] <= 0.52 * whole["bytes"] or name == "two", name
            assert whole["norms"] == cut["norms"], "hooks see the gradients of all parameters"
    whole_bytes = by_rank[0]["two", False]["bytes"]
    assert sum(found["two", True]["bytes"] for found in by_rank) == whole_bytes
    # a checkpoint is whole, and equal: it loads without sharding, and on one device
    for name in ("plain", "clipped", "two"):
        whole, cut = (
            torch.load(tmp_path / f"{name}-{sharded}.ckpt", weights_only=True)["optimizer_states"]
            for sharded in (False, True)
        )
        assert [list(one["state"]) for one in whole] == [list(one["state"]) for one in cut]
        for one, other in zip(whole, cut, strict=True):
            for index, state in one["state"].items():
                assert all(torch.equal(value, other["state"][index][key]) for key, value in state.items())
    single = train(SingleDeviceStrategy(), 1, Deep(), ckpt_path=tmp_path / "plain-True.ckpt", max_epochs=3)
    for found in by_rank:
        torch.testing.assert_close(found["resumed"]["weights"], single["weights"], rtol=0, atol=1e-10)


def test_the_largest_parameters_are_divided_first() -> None:
    sizes = [3, 8, 5, 4, 1]  # 8 | 5 4 | 3 1: to the first, the second twice, the first, and the second
    assert owners([torch.zeros(size) for size in sizes], 2) == [0, 0, 1, 1, 1]


class Whole(Deep):
    """L-BFGS updates all parameters by one line search."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def _refused() -> str:
    with pytest.raises(ConfigError) as info:
        train(DDPStrategy("global", shard_optimizer=True, timeout_s=60), 2, Whole())
    return str(info.value)


def test_an_optimizer_that_sees_several_parameters_at_once_is_refused() -> None:
    for message in run_ranks(_refused, 2):
        assert message.startswith("ddp: shard_optimizer=true updates each parameter on one rank alone, which is known")
        assert message.endswith("got LBFGS. Choose one of these, or set shard_optimizer=false.")
    assert torch.optim.LBFGS not in ELEMENTWISE
