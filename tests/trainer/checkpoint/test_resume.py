"""A run killed anywhere goes on as if nothing had happened: samples, losses and weights, bit by bit."""

import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import Batched, Plan, Streamed, lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evener.strategies import BalancedDataParallelStrategy

EVERY_BATCH = {"interval_s": 0.0}
PERSISTENT = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
UNEVEN = partial(BalancedDataParallelStrategy, weights=[1, 2])
CPUS = ["cpu", "cpu"]
EACH_STEP = {"every_n_steps": 1}
PLANS = {
    "accumulation 3": Plan(0, 3, EVERY_BATCH),
    "workers 2": Plan(2, 1, EACH_STEP),
    "workers 2, exact accumulation 4": Plan(2, 4, EVERY_BATCH, {"exact_accumulation": True}),
    "saved every second step": Plan(0, 1, {"every_n_steps": 2}),
    "validated twice an epoch": Plan(0, 1, {"monitor": "val/loss", "save_top_k": 2}, {"val_check_interval": 0.5}),
    "saved after epochs": Plan(2, 3, {"every_n_epochs": 1}),
    "ddp": Plan(0, 1, EACH_STEP, {}, "ddp", 2, devices=2),
    "ddp, workers 2, accumulation 3": Plan(2, 3, EVERY_BATCH, {"exact_accumulation": True}, "ddp", 2, devices=2),
    "dp, accumulation 3": Plan(0, 3, EVERY_BATCH, strategy="dp", devices=CPUS),
    # one sample was moved from the last chunk to the first in a process's first validation alone
    "dp, validation in even chunks": Plan(0, 1, EACH_STEP, {}, "dp", devices=CPUS, val_loader={"batch_size": 4}),
    "balanced_dp, workers 2": Plan(2, 1, EACH_STEP, strategy=UNEVEN, devices=CPUS),
    "model_parallel": Plan(0, 3, EVERY_BATCH, strategy="model_parallel", devices=CPUS),
    "ddp_model_parallel, accumulation 3": Plan(0, 3, EVERY_BATCH, {}, "ddp_model_parallel", 2, devices=4),
    "iterable": Plan(0, 1, EACH_STEP, dataset=Streamed),
    "iterable, workers 2, accumulation 4": Plan(2, 4, EVERY_BATCH, dataset=Streamed),
    "ddp, iterable, workers 2": Plan(2, 1, EACH_STEP, {}, "ddp", 2, devices=2, dataset=Streamed),
    "no DataLoader": Plan(0, 3, EVERY_BATCH, dataset=Batched),
    "dp, no DataLoader": Plan(0, 1, EVERY_BATCH, strategy="dp", devices=CPUS, dataset=Batched),
    "workers that persist": Plan(2, 1, {"every_n_epochs": 1}, train_loader={"persistent_workers": True}),
    "validation by workers that persist": Plan(
        1, 1, EACH_STEP, {"val_check_interval": 0.5}, val_loader={**PERSISTENT, "shuffle": True}
    ),
    "bounded by steps": Plan(0, 1, {"every_n_epochs": 1}, {"max_steps": 11}),
}


def prove(plan: Plan, places: list[str], directory: Path) -> None:
    """Kill a run at the places in turn, each time resuming it, and compare all with a run left alone."""
    whole = directory / "whole"
    whole.mkdir()
    assert plan.attempt(whole, "run")
    expected = [lines(whole, "run", rank) for rank in range(plan.num_ranks)]
    assert all(len({tuple(line[:2]) for line in rank}) == plan.num_batches for rank in expected)
    weights, metrics = torch.load(whole / "run.end")

    killed = directory / "killed"
    killed.mkdir()
    for number, place in enumerate([*places, None]):
        assert plan.attempt(killed, f"run{number}", place) == (place is None), place
        for rank in range(plan.num_ranks):
            recorded = lines(killed, f"run{number}", rank)
            if recorded:
                start = [line[:2] for line in expected[rank]].index(recorded[0][:2])
                assert recorded == expected[rank][start : start + len(recorded)], place
            validated = lines(killed, f"run{number}.val", rank)
            assert all(line in lines(whole, "run.val", rank) for line in validated), place
    resumed_weights, resumed_metrics = torch.load(killed / f"run{len(places)}.end")
    assert resumed_metrics == metrics
    assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_a_run_killed_somewhere_goes_on_exactly(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    # other places in every run; a failure names the place
    sample = sorted(random.sample(range(len(plan.places)), 2 if plan.num_ranks == 1 else 1))
    prove(plan, [plan.places[i] for i in sample], tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda signum: signum.name)
def test_a_run_that_is_asked_to_stop_finishes_its_step_and_saves(signum: signal.Signals, tmp_path: Path) -> None:
    plan = Plan(checkpoint={"every_n_epochs": 1}, trainer={"val_check_interval": 0.5}, signum=signum)
    prove(plan, ["step 0 2", "step 0 5", "step 1 1"], tmp_path)
    expected = lines(tmp_path / "whole", "run")
    assert [line for number in range(4) for line in lines(tmp_path / "killed", f"run{number}")] == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_is_asked_to_stop_in_a_long_validation_saves_at_once(num_ranks: int, tmp_path: Path) -> None:
    # the validation is not finished; the resumed run begins with it
    plan = Plan(
        strategy="ddp" if num_ranks > 1 else "single_device", num_ranks=num_ranks, devices=num_ranks,
        checkpoint={"every_n_epochs": 1, "monitor": "val/loss"}, trainer={"val_check_interval": 0.5},
        signum=signal.SIGTERM, val_loader={"batch_size": 1}, val_pause_s=0.05,
    )  # fmt: skip
    steps = [3, 9, 12] if num_ranks == 1 else [1, 6]
    prove(plan, [f"validation at {step}" for step in steps], tmp_path)
    for number in range(len(steps)):
        assert len(lines(tmp_path / "killed", f"run{number}.val")) % (22 // num_ranks) != 0
    for rank in range(num_ranks):
        expected = lines(tmp_path / "whole", "run", rank)
        trained = [line for i in range(len(steps) + 1) for line in lines(tmp_path / "killed", f"run{i}", rank)]
        assert trained == expected


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Every tag's steps and values, as TensorBoard shows them."""
    found = EventAccumulator(str(directory / "tensorboard")).Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("checkpoint", "trainer", "places", "validated"),
    [
        *(
            (policy, {}, ["step 0 5", "validation 0", "step 1 3", "epoch end 1"], [5, 11])
            for policy in ({"every_n_steps": 2}, {"every_n_epochs": 1}, {"interval_s": 0.0})
        ),
        # a validation is at the step with which a run that it has saved goes on, from which on points were withdrawn
        ({"monitor": "val/loss"}, {"val_check_interval": 0.5}, ["step 0 4", "step 1 5"], [2, 5, 8, 11]),
    ],
)
def test_tensorboard_shows_one_continuous_curve(
    checkpoint: dict[str, Any], trainer: dict[str, Any], places: list[str], validated: list[int], tmp_path: Path
) -> None:
    prove(Plan(checkpoint=checkpoint, trainer=trainer, tensorboard=True), places, tmp_path)
    whole, killed = curves(tmp_path / "whole"), curves(tmp_path / "killed")
    assert killed == whole
    assert [step for step, _ in whole["train/loss_step"]] == list(range(12))
    assert [step for step, _ in whole["val/loss"]] == validated


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_run_killed_everywhere_goes_on_exactly(name: str, tmp_path: Path) -> None:
    for number, place in enumerate(PLANS[name].places):
        directory = tmp_path / str(number)
        directory.mkdir()
        prove(PLANS[name], [place], directory)
