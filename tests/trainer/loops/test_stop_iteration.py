"""A StopIteration of the user's code is an error where it is raised; it ended an epoch or a run without a word."""

from typing import Any

import pytest
import torch
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

PLACES = (
    "training_step", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "validation_step",
    "on_validation_batch_start", "on_validation_epoch_end", "predict_step",
)  # fmt: skip


class Ends(Tiny):
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
    with pytest.raises(RuntimeError, match=r"run_out raised StopIteration at test_stop_iteration\.py:\d+, which would"):
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
