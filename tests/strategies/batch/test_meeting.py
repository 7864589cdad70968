"""Parts of a step that meet in `evener.over_batch`: which come, random numbers, errors, and the state of threads."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from parity import Case, Net, assert_equal, baseline, fit, run
from torch import Tensor, nn

import evener
from evener.strategies import BalancedDataParallelStrategy, ConfigError, DataParallelStrategy


def spread(rows: Tensor) -> Tensor:
    return rows.square().sum().sqrt()


class Sometimes(Net):
    """Not all parts have samples of the class whose rows meet, in a second meeting."""

    meets_before = False

    def loss(self, batch: Any) -> Tensor:
        out, own = self(batch[0]), batch[1] == 1
        loss = super().loss(batch)
        if self.meets_before:
            loss = loss + evener.over_batch(spread)(out)
        return loss + evener.over_batch(spread)(out[own]) if own.any() else loss


class Again(Sometimes):
    meets_before = True


@pytest.mark.parametrize("module", [Sometimes, Again])
def test_steps_get_whole_batches_where_parts_do_not_come(module: type[Net]) -> None:
    assert_equal(run(Case(module), DataParallelStrategy(), devices=3), baseline(Case(module)), 1e-10)


class Drops(Net):
    def loss(self, batch: Any) -> Tensor:
        rows = nn.functional.dropout(self(batch[0]), 0.5)
        return evener.over_batch(spread)(rows) + nn.functional.dropout(rows, 0.5).mean()


def test_random_numbers_are_the_same_in_every_run() -> None:
    first, second = (run(Case(Drops), DataParallelStrategy(), devices=3) for _ in range(2))
    assert_equal(first, second, 0.0)


class Modes(Net):
    """Notes the state of its threads after a meeting, into which the first part goes without gradients."""

    def note(self, batch: Any) -> None:
        with torch.no_grad() if self is self.trainer.lightning_module else nullcontext():
            evener.over_batch(spread)(batch[0])
            autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            SEEN.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(batch)


SEEN: list[Any] = []


def test_threads_have_the_state_of_the_calling_thread_and_then_their_own() -> None:
    options = {"precision": "bf16-mixed", "num_sanity_val_steps": 0}
    case, module = Case(num=4, dtype=torch.float32, trainer=options), Modes()
    trainer = fit(case, module, DataParallelStrategy(verify=False), devices=3, max_epochs=1)
    training = [one for one in SEEN if one[2] is torch.bfloat16][:3]  # a few samples are looked at before, without
    trainer.validate(module, case.loader(), verbose=False)
    assert training == [(grad, False, torch.bfloat16) for grad in (False, True, True)]
    assert SEEN[-3:] == [(False, True, torch.bfloat16)] * 3


class Fails(Net):
    """Fails after a meeting where it has so many samples."""

    at = 0

    def loss(self, batch: Any) -> Tensor:
        loss = evener.over_batch(spread)(self(batch[0]))
        if len(batch[0]) == self.at:
            raise ValueError("broken")
        return loss


@pytest.mark.parametrize(("at", "part"), [(3, 1), (2, 2), (1, 3)])
def test_an_error_names_its_part_and_ends_the_others(at: int, part: int) -> None:
    module, before = Fails().double(), threading.active_count()
    module.at = at
    strategy = BalancedDataParallelStrategy(weights=[3, 2, 1], verify=False)
    with pytest.raises(ValueError, match=rf"broken \[chunk {part} of 3, {at} of 6 samples, on cpu\]"):
        fit(Case(batch_size=6), module, strategy, devices=3, num_sanity_val_steps=0)
    assert threading.active_count() == before


class Elsewhere(Net):
    def loss(self, batch: Any) -> Tensor:
        return evener.over_batch(spread if self.training and len(batch[0]) == 2 else torch.sum)(self(batch[0]))


class Later(Net):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + evener.over_batch(spread)(self(batch[0])) if self.global_step else loss


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Elsewhere, {"global_view": False}, r"over_batch\(spread\), and chunk 2 .* at over_batch\(sum\): all parts"),
        (Later, {"threads": True}, r"set strategy.threads=false"),
    ],
)  # fmt: skip
def test_parts_that_do_not_meet_are_refused_by_name(module: type[Net], options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(Case(), module().double(), DataParallelStrategy(verify=False, **options), devices=3)
