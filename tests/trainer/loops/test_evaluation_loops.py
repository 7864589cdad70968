"""A validation leaves the training around it as it was, finished or stopped."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.utilities.exceptions import SIGTERMException
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

from evener.trainer.checkpoint import Checkpoint

SAMPLES: Any = torch.arange(8.0)[:, None]


class Draws(Tiny):
    """Draws random numbers in steps of training and of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch) + torch.rand_like(batch)).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(batch_idx + 1)


@pytest.mark.filterwarnings("ignore:.*sampler has shuffling")
@pytest.mark.parametrize("given", [True, False], ids=["the same loader", "a loader of its own"])
def test_validation_leaves_training_as_it_is(given: bool) -> None:
    modules = Draws(), Draws()
    for module, limit in zip(modules, (0, 1.0), strict=True):
        pl.seed_everything(3, verbose=False)
        torch.nn.init.ones_(module.layer.weight)
        torch.nn.init.ones_(module.layer.bias)
        loader = DataLoader(SAMPLES, 2, shuffle=True)
        trainer = quiet(max_epochs=2, limit_val_batches=limit, val_check_interval=2)
        trainer.fit(module, loader, loader if given else DataLoader(SAMPLES[:6], 2))
    assert len(modules[0].losses) == 8
    assert modules[0].losses == modules[1].losses


@pytest.mark.parametrize("in_module", [False, True], ids=["a callback's", "the module's own"])
def test_a_stop_within_a_validation_saves_no_weights_that_stand_in_for_the_trained_ones(
    in_module: bool, tmp_path: Path
) -> None:
    # the average of the weights, which took their place for the validation, was saved as the weights
    trained: list[torch.Tensor] = []

    class Averaged(Tiny):
        def on_train_batch_end(self, *_: Any) -> None:
            trained.append(self.layer.weight.detach().clone())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    class Swapping(Averaged):
        def on_validation_start(self) -> None:
            self.kept = self.layer.weight.detach().clone()
            self.layer.weight.data.zero_()

        def on_validation_epoch_end(self) -> None:
            self.layer.weight.data.copy_(self.kept)

    pl.seed_everything(3, verbose=False)
    callbacks = [Checkpoint(tmp_path), *([] if in_module else [EMAWeightAveraging(decay=0.5)])]
    trainer = quiet(callbacks=callbacks, max_epochs=2, num_sanity_val_steps=0)
    with pytest.raises(SIGTERMException):
        trainer.fit(Swapping() if in_module else Averaged(), DataLoader(SAMPLES, 2), DataLoader(SAMPLES, 2))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    weights = saved["state_dict"] if in_module else saved["current_model_state"]
    assert torch.equal(weights["layer.weight"], trained[-1])
    assert len(trained) == 4
