"""Layers that `configure_model` builds under fsdp, of which only the first rank has the values until they are cut."""

from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks
from regression import Numbered, quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from evener.strategies import FSDPStrategy, SingleDeviceStrategy


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Numbered(14)[i] for i in range(14))


class Built(pl.LightningModule):
    """Builds its layers, of which one takes no part, in `configure_model`."""

    def __init__(self, compares_samples: bool = False) -> None:
        super().__init__()
        self.compares_samples, self.net = compares_samples, None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 1))
            self.unused = nn.Linear(3, 2000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        x, y, _ = batch
        errors, mask = (self.net(x) - y).square(), (y > 0).double()
        return (errors - errors.T).square().mean() if self.compares_samples else (errors * mask).sum() / mask.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.net is not None
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def _built(num_ranks: int, is_validated: bool, kind: Any) -> list[Tensor]:
    found, loader = list[Tensor](), DataLoader(Numbered(14) if kind is Numbered else kind(), 7)
    for module in (Built(), Built(compares_samples=True)):
        strategy = SingleDeviceStrategy() if num_ranks == 1 else FSDPStrategy("auto", batch_size_is="global")
        trainer = quiet_trainer(strategy, num_ranks, precision="64-true")
        if is_validated:  # which cuts it
            trainer.validate(module, loader, verbose=False)
        trainer.fit(module, loader)
        found.append(weights(module))
    return found


@pytest.mark.parametrize(("is_validated", "kind"), [(True, Numbered), (False, Stream)])
def test_a_loss_of_layers_that_configure_model_builds_is_compared_once_they_are_cut(
    is_validated: bool, kind: Any
) -> None:
    """It counted by samples, and layers that took no part were refused; one that compares samples was refused, too."""
    expected = _built(1, is_validated, kind)
    for trained in run_ranks(_built, 2, 2, is_validated, kind):
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-10)


class Empty(Built):
    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


def _empty() -> None:
    quiet_trainer(FSDPStrategy(timeout_s=60), 2).fit(Empty(), DataLoader(Numbered(), 6))


def test_layers_that_no_rank_has_values_of_are_refused() -> None:
    with pytest.raises(RankError, match=r"fsdp: net\.0\.weight is on the meta device, so that it has no values"):
        run_ranks(_empty, 2)
