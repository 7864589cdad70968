"""Under dp each device keeps the optimizer state of some parameters; weights are those of a whole optimizer."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from regression import Net, Numbered, outcome, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import BalancedDataParallelStrategy, ConfigError, DataParallelStrategy, SingleDeviceStrategy
from evener.strategies.sharding.device_shards import DeviceShards

OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, foreach=True),
}
Sharded = partial(DataParallelStrategy, shard_optimizer=True)


class Deep(Net):
    """Of six layers in two groups, with a scheduler that counts the optimizer's steps."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        layers = [layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(3, 16), *layers, nn.Linear(16, 1)).double()
        self.optimizer = optimizer
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters()]
        self.norms.append(float(torch.stack([grad.norm() for grad in grads if grad is not None]).norm()))

    def configure_optimizers(self) -> Any:
        decayed = {"params": self.net[:6].parameters(), "weight_decay": 0.2}
        optimizer = OPTIMIZERS[self.optimizer]([decayed, {"params": self.net[6:].parameters(), "lr": 0.03}])
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def train(strategy: Any, devices: int, module: Any, path: Path | None = None, **options: Any) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    checkpoint = options.pop("ckpt_path", None)
    options = {"gradient_clip_val": 0.4, "accumulate_grad_batches": 2, **options}
    trainer = quiet_trainer(strategy, devices, **options)
    trainer.fit(module, DataLoader(Numbered(), 6), ckpt_path=checkpoint)
    if path is not None:
        trainer.save_checkpoint(path)
    return {**outcome(module, trainer), "norms": module.norms}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.equal(found["weights"], expected["weights"])
    assert {**found, "weights": 0} == {**expected, "weights": 0}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_are_bitwise_those_of_a_whole_optimizer(optimizer: str) -> None:
    same(train(Sharded(), 3, Deep(optimizer)), train(DataParallelStrategy(), 3, Deep(optimizer)))


def test_the_first_device_may_have_few_samples() -> None:
    strategy = partial(BalancedDataParallelStrategy, gpu0_chunk=1)
    same(train(strategy(shard_optimizer=True), 2, Deep()), train(strategy(), 2, Deep()))


def test_each_device_keeps_its_part() -> None:
    net = Deep().net
    optimizer = torch.optim.AdamW(net.parameters())
    # where a state is copied from tells its device: `meta` has no values
    shards = DeviceShards(optimizer, [torch.device("cpu")] * 2, "dp")
    net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    shards._devices[1] = torch.device("meta")
    shards.take_state()
    # of 48 + 5 * 256 + 16 weights and 6 * 16 + 1 biases the first device has three of the largest; two states of each
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    sizes = {kind: sum(state.nbytes for state in states if state.device.type == kind) for kind in ("cpu", "meta")}
    assert sizes == {"cpu": 2 * 8 * 3 * 256, "meta": 2 * 8 * (48 + 2 * 256 + 16 + 6 * 16 + 1)}


def test_checkpoints_are_whole_and_load_with_and_without(tmp_path: Path) -> None:
    whole = train(DataParallelStrategy(), 2, Deep(), tmp_path / "whole.ckpt", max_epochs=1)
    same(train(Sharded(), 2, Deep(), tmp_path / "cut.ckpt", max_epochs=1), whole)
    one, other = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "cut"))
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (one, other)]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][i][key], states[1][i][key]) for i in states[0] for key in states[0][i])
    expected = train(DataParallelStrategy(), 2, Deep(), ckpt_path=tmp_path / "whole.ckpt", max_epochs=3)
    same(train(Sharded(), 2, Deep(), ckpt_path=tmp_path / "whole.ckpt", max_epochs=3), expected)
    same(train(DataParallelStrategy(), 2, Deep(), ckpt_path=tmp_path / "cut.ckpt", max_epochs=3), expected)
    found = train(SingleDeviceStrategy(), 1, Deep(), ckpt_path=tmp_path / "cut.ckpt", max_epochs=3)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-10)


class Lbfgs(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Fused(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Lbfgs, {}, "dp: shard_optimizer=true updates each parameter"),
        (Fused, {"gradient_clip_val": None}, "AdamW has fused=True"),
        (Deep, {"size": 2}, "dp: shard_optimizer=true was given with model_parallel_size=2"),
    ],
)
def test_what_cannot_be_divided_is_refused(module: Any, options: dict[str, Any], message: str) -> None:
    options = dict(options)
    strategy = Sharded(model_parallel_size=options.pop("size", 1))
    with pytest.raises(ConfigError, match=message):
        train(strategy, 2, module(), accumulate_grad_batches=1, **options)
