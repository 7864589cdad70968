"""The same drawn training under every strategy and on one device: equal, or refused before the first step.

`pytest tests/differential` draws for about 60 s with a fixed seed. `pytest -m slow tests/differential` runs as many
cases per strategy as DIFFERENTIAL_CASES says (with DIFFERENTIAL_SEED), reduces every failure to the fields that matter,
and writes the table of verdicts; `-k ddp` runs a part.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import late_device
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from late_device import needs_late_device

from . import cases
from .cases import (
    CASES,
    RANKS,
    SPREADS,
    Batches,
    Case,
    Loading,
    Log,
    Net,
    Optimization,
    Options,
    Returns,
    Spread,
    brief,
)  # fmt: skip
from .hunting import Hunt
from .observe import observe_on_late_devices
from .pool import Pool
from .settled import settled

FAST = {"single_device": 10, "dp": 12, "balanced_dp": 6, "model_parallel": 8, "ddp": 6, "ddp_global_view": 6,
        "balanced_ddp": 4, "ddp_model_parallel": 2}  # fmt: skip
"""Cases per strategy in every run of the tests."""
NUM_CASES = int(os.environ.get("DIFFERENTIAL_CASES", "250"))
SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))
COMMON: dict[str, Any] = {
    "deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "print_blob": False
}  # fmt: skip


@pytest.fixture(scope="module")
def hunt(request: pytest.FixtureRequest) -> Iterator[Hunt]:
    found = Hunt()
    yield found
    found.pool.restart()
    show(request, found.table())


def show(request: pytest.FixtureRequest, text: str) -> None:
    """Write to the terminal, captured or not."""
    plugins = request.config.pluginmanager
    if terminal := plugins.getplugin("terminalreporter"):  # which a worker of pytest-xdist lacks
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            terminal.write_line(f"\n{text}")


def hold(case: Case, spread: Spread, hunt: Hunt) -> None:
    case = settled(case, spread)
    verdict = hunt.judge(case, spread)
    if not verdict.accepted:
        case, verdict = hunt.reduce(case, spread, verdict, seconds=30)
    assert verdict.accepted, f"{brief(case)} under {brief(spread)}:\n{verdict.word}: {verdict.detail}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FAST)
def test_a_drawn_training_equals_one_device_or_is_refused(kind: str, hunt: Hunt) -> None:
    @settings(max_examples=FAST[kind], derandomize=True, phases=[Phase.generate], **COMMON)
    @given(case=CASES, spread=SPREADS[kind])
    def holds(case: Case, spread: Spread) -> None:
        hold(case, spread, hunt)

    holds()


ON_LATE_DEVICES = {"dp": 12, "balanced_dp": 6, "ddp": 4, "fsdp": 4}


def movable(case: Case) -> Case:
    """A case without what Lightning itself does otherwise on accelerators.

    It leaves some containers where they are, draws the weights of `configure_model` on the device, and `ModelPruning`
    goes back to the first weights there (on a CPU these are the trained ones' own memory). torch unties parameters that
    it moves to a device of other makers.
    """
    shape = "tuple" if case.batches.shape == "namespace" else case.batches.shape
    extras = tuple(extra for extra in case.batches.extras if extra not in ("deque", "ndarray"))
    kept = tuple(name for name in case.net.peculiar if name not in ("configure_model", "own_transfer", "moves_batch"))
    callbacks = tuple(name for name in case.callbacks if not name.startswith("pruning"))
    net = replace(case.net, peculiar=kept, kind="deep" if case.net.kind == "tied" else case.net.kind)
    return replace(case, batches=replace(case.batches, shape=shape, extras=extras), net=net, callbacks=callbacks)


@needs_late_device
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ON_LATE_DEVICES)
def test_a_drawn_training_on_late_devices_equals_one_cpu_or_is_refused(kind: str) -> None:
    late_device.build()
    hunt = Hunt(Pool(observe_on_late_devices))

    @seed(3)
    @settings(max_examples=ON_LATE_DEVICES[kind], phases=[Phase.generate], **COMMON)
    @given(case=CASES, spread=SPREADS[kind])
    def holds(case: Case, spread: Spread) -> None:
        hold(movable(case), spread, hunt)

    try:
        holds()
    finally:
        hunt.pool.restart()


DDP, REPLICAS = Spread("ddp", 2, RANKS), Spread("ddp", 4, (*RANKS, ("devices_per_process", 2)))
VIEW, UNEVEN = Spread("ddp", 2, (*RANKS, ("global_view", True))), Spread("balanced_dp", 3, (("weights", (1, 2, 2)),))
FSDP = Spread("fsdp", 2, (("batch_size_is", "global"), ("timeout_s", 20)))


def of(*extras: str, shape: str = "tuple", net: str = "", **more: Any) -> Case:
    """A case by its batches' fields and shape, a peculiarity, and what else its loaders, options and itself have."""
    loading, options = (
        kind(**{name: more.pop(name) for name in list(more) if name in kind.__dataclass_fields__})
        for kind in (Loading, Options)
    )
    return Case(Batches(shape, extras), loading, Net(peculiar=(net,) * bool(net)), options=options, **more)


TOGGLED, CONSTANT = Optimization(optimizer="manual_toggle"), (Log(where="eval", batch_size="constant"),)
FOUND: dict[str, tuple[Spread, Case]] = {
    "a window was refused after an epoch, as a rank had no sample of its last batch": (
        DDP, of(logs=(Log(value="running_mean", on_epoch=True),))
    ),
    "the second evaluation of loaders that each rank reads whole added up what the ranks had": (
        DDP, of(eval_kind="min_size", logs=(Log(value="n", where="eval"),))
    ),
    "a list as long as the loader's batch_size was taken for the samples of a smaller batch": (
        DDP, of("nested_lists", "views", eval_kind="iterable", eval_num=1, eval_batch_size=3)
    ),
    "callbacks of Lightning's loop, which runs this step, read values before the ranks had met": (
        DDP, of(max_steps=3, resume_after=1)
    ),
    "a rank of a global view looked for a state of its own, where there is one of one rank": (
        VIEW, of(max_steps=3, resume_after=1)
    ),
    "the first rank alone gathered the rows that a metric keeps, to save them, and waited for the other": (
        VIEW, of(max_epochs=1, logs=(Log(value="auroc"),), resume_after=1)
    ),
    "a kernel read lengths of a packed sequence, of which the rank had a part": (VIEW, of("packed")),
    "the batches of the shorter one of two loaders were counted on beyond its end": (
        DDP, of(second=(12, 2), eval_kind="max_size", eval_num=2, eval_batch_size=2)
    ),
    "batches evaluated side by side of which ranks have other fractions were refused": (DDP, of(eval_kind="max_size")),
    "a stream's tensor whose samples are in dimension 1 failed": (DDP, of("time_first", eval_kind="iterable")),
    "a stream's tensor whose rows are not samples failed in the module": (DDP, of("flat", kind="iterable")),
    "experts that the samples choose were refused, one step late where the first batch shows all": (
        DDP, of(net="experts", kind="max_size_cycle", num=5, batch_size=2)
    ),
    "a value that only the other rank had logged was logged here with other arguments": (
        DDP, of(kind="dict", second=(5, 3), eval_num=1, before="test")
    ),
    "an empty loader that is made again drew a seed more, so that the next module began with other weights": (
        DDP, of(num=1, drop_last=True, reload_dataloaders_every_n_epochs=1, before="validate", resume_after=1)
    ),
    "parts fail, and a cut into one part was taken for right": (
        Spread("model_parallel", 2, (("num_microbatches", 2),)), of("flat", kind="no_batching", batch_size=2)
    ),
    "an empty stream": (DDP, of(kind="iterable", num=1, drop_last=True, before="test", resume_after=1)),
    "of a step that is called twice only the last call's values were exchanged": (
        DDP, of(returns=Returns(train="sum"), optimization=Optimization(optimizer="twice"))
    ),
    "pruning was given the weights after an evaluation of averaged ones, not those": (
        DDP, of(callbacks=("averaging", "pruning_global"))
    ),
    "the second of two loaders read side by side was joined after each part's first": (
        UNEVEN, of(eval_kind="min_size", returns=Returns(evaluation="list"))
    ),
    "of a stream nothing was compared: its parts failed": (UNEVEN, of("time_first", eval_kind="iterable")),
    "the same of class weights": (UNEVEN, of("class_weights", eval_kind="iterable", eval_batch_size=3)),
    "the same of pairs": (UNEVEN, of(shape="pairs", eval_kind="batches", eval_batch_size=3)),
    "whole numbers were refused": (UNEVEN, of(returns=Returns(evaluation="ints"))),
    "a first chunk that is larger than an even share was refused, of what dp trains rightly": (
        Spread("balanced_dp", 3, (("gpu0_chunk", 1),)), of(batch_size=2)
    ),
    "an evaluation was compared before the hooks of its epoch's start, which this metric needs": (
        DDP, of(net="tracker", logs=CONSTANT)
    ),
    "the same with replicas": (REPLICAS, of(net="tracker", logs=CONSTANT)),
    "predictions of replicas of ranks were joined without a look at how parts make them": (
        REPLICAS, of(returns=Returns(predict="ragged"))
    ),
    "parts of streams were not compared, so that what the convention cuts wrongly was cut": (
        DDP, of("unlabelled", kind="iterable_unsized", batch_size=2)
    ),
    "two rows of two samples": (DDP, of("flat", kind="iterable", batch_size=2)),
    "chunks of a stream": (REPLICAS, of("flat", eval_kind="iterable")),
    "whole batches of a rank were cut by its devices": (
        REPLICAS, Case(batches=Batches(extras=("vector4",)), loading=Loading(kind="no_batching", batch_size=3))
    ),
    "a vector in a stream": (DDP, of("vector4", eval_kind="iterable", eval_num=8)),
    "it was not known of a stream what the `batch_size` is that an evaluation logs": (
        DDP, of(net="tracker", eval_kind="iterable", logs=CONSTANT)
    ),
    "replicas' copies of what was toggled off were written to while the second backward needed them": (
        Spread("dp", 3), of(optimization=TOGGLED)
    ),
    "what was toggled off between two backward passes of one graph has no gradient, of which the layout was asked": (
        FSDP, of(optimization=TOGGLED)
    ),
    "what a loss divides by was looked for in the module's own precision, where its step failed": (
        FSDP, of(precision="64-true", returns=Returns(train="sum"), dtype="float32")
    ),
    "an optimizer that searches along a line got the mean of the ranks' losses, which add up": (
        DDP, of(returns=Returns(train="sum"), optimization=Optimization(optimizer="lbfgs_wolfe"))
    ),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FOUND)
def test_what_draws_have_found_wrong_is_exact(name: str, hunt: Hunt) -> None:
    spread, case = FOUND[name]
    verdict = hunt.judge(case, spread)
    assert verdict.word == "equal", verdict.detail


@pytest.mark.timeout(300)
def test_a_stop_within_an_epoch_keeps_the_shards_of_a_moving_average(hunt: Hunt) -> None:
    """The state of stochastic weight averaging was moved to the host, and each rank has a shard: refused late."""
    verdict = hunt.judge(Case(callbacks=("swa",), options=Options(max_steps=5)), FSDP)
    assert verdict.accepted, verdict.detail  # a `test` afterwards, for which the callback copies the module, is refused


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", SPREADS)
def test_many_drawn_trainings_equal_one_device_or_are_refused(kind: str, request: pytest.FixtureRequest) -> None:
    hunt = Hunt()

    @seed(SEED)
    @settings(max_examples=NUM_CASES, phases=[Phase.generate], **COMMON)
    @given(case=CASES, spread=SPREADS[kind])
    def look(case: Case, spread: Spread) -> None:
        # a discarded case does not count, and another is drawn
        assume(hunt.add(settled(case, spread), spread).word != "discarded")

    look()
    hunt.pool.restart()
    show(request, "\n\n".join([f"{kind}: {hunt.table()}", *hunt.failures.values()]))
    assert not hunt.failures, "\n\n".join(hunt.failures.values())


@given(case=CASES, spread=st.one_of(*SPREADS.values()))
@settings(max_examples=30, derandomize=True, **COMMON)
def test_a_case_is_its_description(case: Case, spread: Spread) -> None:
    assert eval(brief(case), vars(cases)) == case
    assert eval(repr(spread), vars(cases)) == spread
