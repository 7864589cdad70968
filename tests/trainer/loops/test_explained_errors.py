"""Errors that name neither the module nor what to change say so, and a StopIteration of the user's code is one."""

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


PLACES = (
    "training_step", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "validation_step",
    "on_validation_batch_start", "on_validation_epoch_end", "predict_step",
)  # fmt: skip


class Ends(Tiny):
    """Calls next() of what has ended; an epoch or a run ended there without a word."""

    def __init__(self, place: str) -> None:
        super().__init__()
        if place in PLACES:
            setattr(self, place, self.run_out)

    def run_out(self, *_: Any) -> None:
        next(iter(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Does nothing."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_stop_iteration_of_the_users_code_is_named_with_its_place(place: str) -> None:
    trainer = quiet(num_sanity_val_steps=0)
    data: Any = DataLoader([torch.ones(1)] * 3)  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"run_out raised StopIteration at test_explained_errors\.py:\d+, which would"
    ):
        trainer.predict(Ends(place), data) if place == "predict_step" else trainer.fit(Ends(place), data, data)


class Pulls(Ends):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.layer(batch).sum()


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_asks_the_loader_itself_ends_with_it() -> None:
    trainer = quiet()
    trainer.fit(Pulls("none"), DataLoader([torch.ones(1)] * 3))  # type: ignore[arg-type]
    assert trainer.global_step == 3
