"""Layers that `configure_model` builds under fsdp, of which only the first rank has the values until they are cut;
and which parts of a module are gathered one by one."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks
from regression import Numbered, assert_as_single, trainer_of, weights
from tiny import Streamed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import ConfigError
from evener.strategies.sharding.parts import automatic_parts, named_parts


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


def _built(strategy: str, is_validated: bool, is_stream: bool) -> list[Tensor]:
    found, loader = list[Tensor](), DataLoader(Streamed(Numbered(14)) if is_stream else Numbered(14), 7)
    for module in (Built(), Built(compares_samples=True)):
        trainer = trainer_of(strategy, precision="64-true")
        if is_validated:  # which cuts it
            trainer.validate(module, loader, verbose=False)
        if strategy == "shards" and is_stream and module.compares_samples:
            with pytest.raises(
                ConfigError, match=r"differs from one device's by .*strategy\.global_view=true, which is"
            ):
                trainer.fit(module, loader)
        else:
            trainer.fit(module, loader)
            found.append(weights(module))
    return found[: 1 if is_stream else 2]


@pytest.mark.parametrize(("is_validated", "is_stream"), [(True, False), (False, True)])
def test_a_loss_of_layers_that_configure_model_builds_is_compared_once_they_are_cut(
    is_validated: bool, is_stream: bool
) -> None:
    """It counted by samples, and layers that took no part were refused; one that compares samples was refused, too.

    Where a stream without a length has been read by then it is refused: whole batches would come too late.
    """
    assert_as_single(_built, "shards", is_validated, is_stream)


class Empty(Built):
    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


def _empty() -> None:
    trainer_of("shards").fit(Empty(), DataLoader(Numbered(), 6))


def test_layers_that_no_rank_has_values_of_are_refused() -> None:
    with pytest.raises(RankError, match=r"fsdp: net\.0\.weight is on the meta device, so that it has no values"):
        run_ranks(_empty, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scales = nn.ParameterList([nn.Parameter(nn.init.ones_(self.body.bias.new_empty(4)))])
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def test_tied_parts_batchnorm_lists_of_parameters_and_small_parts_stay_with_the_root() -> None:
    assert automatic_parts(Tied(), ["embed", "body", "norm", "scales", "head"]) == ["body"]
    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(1, 1), nn.Linear(100, 10))  # below a hundredth
    assert automatic_parts(module, ["0", "1", "2"]) == ["0", "2"]


def test_named_parts_come_before_the_parts_that_they_are_in() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    assert named_parts(module, ["0", "0.1"]) == ["0.1", "0"]


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["boddy"], r"fsdp: shard: Tied has no module 'boddy'; the nearest are body"),
        (["head"], r"head shares the parameter embed.weight with the rest of the module"),
    ],
)
def test_names_that_cannot_be_parts_are_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        named_parts(Tied(), names)
