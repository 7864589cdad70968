"""Errors of torch that name neither the module nor what to change say so."""

from typing import Any

import pytest
import torch
from tiny import Tiny, quiet
from torch.utils.data import DataLoader, TensorDataset


class Detached(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx).detach()


class WithoutParameters(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Identity()


class Fails(Tiny):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise RuntimeError(self.text)


DETACHED = r"^The loss has no gradient: it was detached.* Return the loss as"
WITHOUT_MEMORY = r"^The data workers need more shared memory \(/dev/shm\) .*num_workers=0 \("
RANKS = {"strategy": "ddp", "devices": 2}


@pytest.mark.parametrize(
    ("module", "options", "told"),
    [
        (Detached(), {"devices": 1}, DETACHED),
        (Detached(), {"strategy": "dp", "devices": ["cpu", "cpu"]}, DETACHED),
        (Detached(), {"lean": False}, DETACHED),
        (WithoutParameters(), RANKS, "ddp: WithoutParameters has no parameter that requires a gradient, so there is"),
        # it was told as a full disk
        (Fails("unable to allocate shared memory(shm) for file </torch_1>: No space left (28)"), {}, WITHOUT_MEMORY),
        (Fails("Bus error. It is possible that dataloader's workers are out of shared memory."), {}, WITHOUT_MEMORY),
    ],
)
def test_an_error_of_torch_is_explained(module: Tiny, options: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match=told):
        quiet(**options).fit(module, DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=4))


@pytest.mark.parametrize("place", ["training_step", "validation_step", "predict_step"])
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_stop_iteration_of_a_step_is_refused(place: str) -> None:
    # an epoch or a run ended there without a word
    module, trainer = Tiny(), quiet(num_sanity_val_steps=0)
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    setattr(module, place, lambda batch, batch_idx: next(iter(())))
    data: Any = DataLoader([torch.ones(1)] * 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"{place} raised StopIteration, which would end the epoch without a word"):
        trainer.predict(module, data) if place == "predict_step" else trainer.fit(module, data, data)
