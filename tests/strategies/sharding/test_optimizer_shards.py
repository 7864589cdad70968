"""Each rank keeps the optimizer state of some parameters; weights are those of whole optimizers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, refusal, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy, SingleDeviceStrategy

ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


class Deep(Net):
    """Of nine layers, with a scheduler that counts the optimizer's steps."""

    def __init__(self, optimizer: Any = ADAMW) -> None:
        super().__init__()
        layers = [layer for _ in range(7) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(3, 16), *layers, nn.Linear(16, 1)).double()
        self.optimizer = optimizer
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters()]
        self.norms.append(float(torch.stack([grad.norm() for grad in grads if grad is not None]).norm()))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Two(Deep):
    """Two optimizers by hand, one of which is used every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
        for optimizer in (first, second)[: 1 + batch_idx % 2]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.net[:4], self.net[4:])]


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Deep, {}),
    "clipped": (Deep, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "two": (Two, {}),
    "RMSprop": (partial(Deep, partial(torch.optim.RMSprop, lr=0.01, foreach=False)), {}),
}


def _train(strategy: Any, devices: int, name: str, path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Weights, bytes of the optimizers' state, and the norms of gradients before each step."""
    pl.seed_everything(7, verbose=False)
    (make, given), checkpoint = WAYS[name], options.pop("ckpt_path", None)
    module, trainer = make(), quiet_trainer(strategy, devices, **given, **options)
    trainer.fit(module, DataLoader(Numbered(), 6), ckpt_path=checkpoint)
    if path is not None:
        trainer.save_checkpoint(path)
    values = [v for optimizer in trainer.optimizers for state in optimizer.state.values() for v in state.values()]
    num_bytes = sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())
    return {"weights": weights(module), "bytes": num_bytes, "norms": module.norms}


def _sharded(folder: Path) -> dict[Any, dict[str, Any]]:
    strategy = partial(DDPStrategy, "global", timeout_s=60)
    found: dict[Any, dict[str, Any]] = {
        (name, cut): _train(strategy(shard_optimizer=cut), 2, name, folder / f"{name}-{cut}.ckpt")
        for name in WAYS
        for cut in (False, True)
    }
    resumed = {"ckpt_path": folder / "plain-True.ckpt", "max_epochs": 3}
    return found | {"resumed": _train(strategy(shard_optimizer=True), 2, "plain", **resumed)}


def test_sharded_optimizers_give_the_weights_of_whole_ones_and_half_the_state(tmp_path: Path) -> None:
    by_rank = run_ranks(_sharded, 2, tmp_path, timeout_s=300)
    for name in WAYS:
        for found in by_rank:
            whole, cut = found[name, False], found[name, True]
            assert torch.equal(whole["weights"], cut["weights"]), name
            assert cut["bytes"] <= 0.52 * whole["bytes"] or name == "two", name
            assert whole["norms"] == cut["norms"], "hooks see the gradients of all parameters"
        assert sum(found[name, True]["bytes"] for found in by_rank) == by_rank[0][name, False]["bytes"]
        # a checkpoint is whole, and equal: it loads without sharding, and on one device
        wholes, cuts = (
            torch.load(tmp_path / f"{name}-{cut}.ckpt", weights_only=True)["optimizer_states"] for cut in (False, True)
        )
        for one, other in zip(wholes, cuts, strict=True):
            assert list(one["state"]) == list(other["state"])
            for index, state in one["state"].items():
                assert all(torch.equal(value, other["state"][index][key]) for key, value in state.items())
    single = _train(SingleDeviceStrategy(), 1, "plain", ckpt_path=tmp_path / "plain-True.ckpt", max_epochs=3)
    for found in by_rank:
        torch.testing.assert_close(found["resumed"]["weights"], single["weights"], rtol=0, atol=1e-10)


def _refused() -> str:
    trainer = quiet_trainer(DDPStrategy("global", shard_optimizer=True, timeout_s=60), 2)
    return refusal(trainer, Deep(torch.optim.LBFGS), DataLoader(Numbered(), 6))


def test_an_optimizer_that_sees_several_parameters_at_once_is_refused() -> None:
    for message in run_ranks(_refused, 2):
        assert message.startswith("ddp: shard_optimizer=true updates each parameter on one rank alone, which is known")
        assert message.endswith("got LBFGS. Choose one of these, or set shard_optimizer=false.")
