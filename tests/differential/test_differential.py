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

from .cases import Batches, Case, Loading, Log, Net, Optimization, Options, Returns, Spread, brief
from .draw import CASES, SPREADS
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FAST)
def test_a_drawn_training_equals_one_device_or_is_refused(kind: str, hunt: Hunt) -> None:
    @settings(max_examples=FAST[kind], derandomize=True, phases=[Phase.generate], **COMMON)
    @given(case=CASES, spread=SPREADS[kind])
    def holds(case: Case, spread: Spread) -> None:
        case = settled(case, spread)
        verdict = hunt.judge(case, spread)
        if not verdict.accepted:
            case, verdict = hunt.reduce(case, spread, verdict, seconds=30)
        assert verdict.accepted, f"{brief(case)} under {brief(spread)}:\n{verdict.word}: {verdict.reason}"

    holds()


ON_LATE_DEVICES = {"dp": 12, "balanced_dp": 6, "ddp": 4, "fsdp": 4}


def movable(case: Case) -> Case:
    """A case without what Lightning itself does otherwise on accelerators.

    It leaves some containers where they are, draws the weights of `configure_model` on the device, and `ModelPruning`
    goes back to the first weights there (on a CPU these are the trained ones' own memory). torch unties parameters that
    it moves to a device of other makers.
    """
    batches = replace(
        case.batches,
        shape="tuple" if case.batches.shape == "namespace" else case.batches.shape,
        extras=tuple(extra for extra in case.batches.extras if extra not in ("deque", "ndarray")),
    )
    kept = tuple(name for name in case.net.peculiar if name not in ("configure_model", "own_transfer", "moves_batch"))
    callbacks = tuple(name for name in case.callbacks if not name.startswith("pruning"))
    net = replace(case.net, peculiar=kept, kind="deep" if case.net.kind == "tied" else case.net.kind)
    return replace(case, batches=batches, net=net, callbacks=callbacks)


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
        case = settled(movable(case), spread)
        verdict = hunt.judge(case, spread)
        assert verdict.accepted, f"{brief(case)} under {brief(spread)}:\n{verdict.word}: {verdict.reason}"

    try:
        holds()
    finally:
        hunt.pool.restart()


@pytest.mark.timeout(200)
def test_callbacks_read_values_of_all_ranks_in_the_first_step_after_a_restart(hunt: Hunt) -> None:
    """Lightning's loop, which runs this step, called `on_train_batch_end` before the ranks had met."""
    spread = Spread("ddp", 2, (("batch_size_is", "global"), ("timeout_s", 6)))
    verdict = hunt.judge(Case(options=Options(max_steps=3), resume_after=1), spread)
    assert verdict.word == "equal", verdict.reason


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("case", "global_view"),
    [
        # a rank of a global view looked for a state of its own, where there is one of one rank
        (Case(options=Options(max_steps=3), resume_after=1), True),
        # the first rank alone gathered the rows that a metric keeps, to save them, and waited for the other
        (Case(logs=(Log(value="auroc"),), options=Options(max_epochs=1), resume_after=1), True),
        # a kernel read lengths of a packed sequence, of which the rank had a part
        (Case(batches=Batches(extras=("packed",))), True),
        # the batches of the shorter one of two loaders were counted on beyond its end
        (Case(loading=Loading(second=(12, 2), eval_kind="max_size", eval_num=2, eval_batch_size=2)), False),
        # batches evaluated side by side of which ranks have other fractions were refused
        (Case(loading=Loading(eval_kind="max_size", eval_num=9, eval_batch_size=4)), False),
        # a stream's tensor whose samples are in dimension 1 failed in the module
        (Case(batches=Batches(extras=("time_first",)), loading=Loading(eval_kind="iterable")), False),
        # a stream's tensor whose rows are not samples failed in the module, or was refused where their number changed
        (Case(batches=Batches(extras=("flat",)), loading=Loading(kind="iterable")), False),
        # experts that the samples choose were refused, one step late where the first batch shows all
        (Case(loading=Loading(kind="max_size_cycle", num=5, batch_size=2), net=Net(peculiar=("experts",))), False),
        # a value that only the other rank had logged was logged here with other arguments
        (Case(loading=Loading(kind="dict", second=(5, 3), eval_num=1), before="test"), False),
        # an empty loader that is made again drew a seed more, so that the next module began with other weights
        (
            Case(
                loading=Loading(num=1, drop_last=True),
                options=Options(reload_dataloaders_every_n_epochs=1),
                before="validate",
                resume_after=1,
            ),
            False,
        ),
        (Case(loading=Loading(kind="iterable", num=1, drop_last=True), before="test", resume_after=1), False),
        # values by step waited for ranks that were there in the sanity check, but in no validation after it
        (
            Case(
                batches=Batches(extras=("one",)),
                loading=Loading(kind="iterable"),
                logs=(Log(where="eval", on_step=True),),
                options=Options(num_sanity_val_steps=2),
                after="fit",
            ),
            False,
        ),
        # of a step that is called twice only the last call's values were exchanged
        (Case(returns=Returns(train="sum"), optimization=Optimization(optimizer="twice")), False),
        # pruning was given the weights after an evaluation of averaged ones, not those
        (Case(callbacks=("averaging", "pruning_global")), False),
    ],
    ids=[
        "resumed",
        "saved rows",
        "packed",
        "a shorter loader",
        "unequal loaders",
        "time first",
        "flat",
        "experts",
        "one rank alone",
        "an empty loader",
        "an empty stream",
        "whole after the sanity check",
        "twice",
        "pruned average",
    ],
)
def test_what_draws_have_found_wrong_under_ddp(case: Case, global_view: bool, hunt: Hunt) -> None:
    more = (("global_view", True),) * global_view
    spread = Spread("ddp", 2, (("batch_size_is", "global"), ("timeout_s", 6), *more))
    verdict = hunt.judge(case, spread)
    assert verdict.word == "equal", verdict.reason


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "case",
    [
        # the second of two loaders read side by side was joined after each part's first
        Case(loading=Loading(eval_kind="min_size"), returns=Returns(evaluation="list")),
        # of a stream nothing was compared: its parts failed in the module
        Case(batches=Batches(extras=("time_first",)), loading=Loading(eval_kind="iterable")),
        Case(batches=Batches(extras=("class_weights",)), loading=Loading(eval_kind="iterable", eval_batch_size=3)),
        Case(batches=Batches(shape="pairs"), loading=Loading(eval_kind="batches", eval_batch_size=3)),
        # whole numbers were refused
        Case(returns=Returns(evaluation="ints")),
    ],
    ids=["side by side", "time first", "class weights", "pairs", "whole numbers"],
)
def test_what_draws_have_found_wrong_in_evaluations_under_balanced_dp(case: Case, hunt: Hunt) -> None:
    verdict = hunt.judge(case, Spread("balanced_dp", 3, (("weights", (1, 2, 2)),)))
    assert verdict.word == "equal", verdict.reason


def test_a_first_chunk_may_be_larger_than_an_even_share(hunt: Hunt) -> None:
    # It was refused, of what dp trains rightly.
    spread = Spread("balanced_dp", 3, (("gpu0_chunk", 1),))
    verdict = hunt.judge(Case(loading=Loading(batch_size=2)), spread)
    assert verdict.word == "equal", verdict.reason


CONSTANT = (Log(where="eval", batch_size="constant"),)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("case", "replicas"),
    [
        # an evaluation was compared before the hooks of its epoch's start, which this metric needs
        (Case(net=Net(peculiar=("tracker",)), logs=CONSTANT), 1),
        (Case(net=Net(peculiar=("tracker",)), logs=CONSTANT), 2),
        # parts of streams were not compared, so that what the convention cuts wrongly was cut
        (Case(batches=Batches(extras=("unlabelled",)), loading=Loading(kind="iterable_unsized", batch_size=2)), 1),
        (Case(batches=Batches(extras=("flat",)), loading=Loading(kind="iterable", batch_size=2)), 1),
        (Case(batches=Batches(extras=("flat",)), loading=Loading(eval_kind="iterable")), 2),
        (Case(batches=Batches(extras=("vector4",)), loading=Loading(eval_kind="iterable", eval_num=8)), 1),
        # nor was it known of a stream what the `batch_size` is that an evaluation logs
        (Case(net=Net(peculiar=("tracker",)), logs=CONSTANT, loading=Loading(eval_kind="iterable")), 1),
    ],
    ids=["hooks", "hooks and replicas", "two tensors", "two of two", "chunks", "a vector", "a constant"],
)
def test_what_is_compared_on_the_first_batch_is_exact_under_ddp(case: Case, replicas: int, hunt: Hunt) -> None:
    more = (("devices_per_process", 2),) * (replicas > 1)
    spread = Spread("ddp", 2 * replicas, (("batch_size_is", "global"), ("timeout_s", 6), *more))
    verdict = hunt.judge(case, spread)
    assert verdict.word == "equal", verdict.reason


def test_toggled_optimizers_may_share_a_graph_under_dp(hunt: Hunt) -> None:
    # The replicas' copies of what was toggled off were written to while the graph of the second backward needed them.
    verdict = hunt.judge(Case(optimization=Optimization(optimizer="manual_toggle")), Spread("dp", 3))
    assert verdict.word == "equal", verdict.reason


@pytest.mark.timeout(200)
def test_toggled_optimizers_may_share_a_graph_under_fsdp(hunt: Hunt) -> None:
    # What was toggled off between two backward passes of one graph has no gradient, of which the layout was asked.
    spread = Spread("fsdp", 2, (("batch_size_is", "global"),))
    verdict = hunt.judge(Case(optimization=Optimization(optimizer="manual_toggle")), spread)
    assert verdict.word == "equal", verdict.reason


@pytest.mark.timeout(200)
def test_a_sum_is_exact_under_fsdp_in_a_precision_that_is_not_the_modules(hunt: Hunt) -> None:
    # What a loss divides by was looked for in the module's own precision, where its step failed on the samples.
    spread = Spread("fsdp", 2, (("batch_size_is", "global"), ("timeout_s", 20)))
    case = Case(returns=Returns(train="sum"), options=Options(precision="64-true"), dtype="float32")
    verdict = hunt.judge(case, spread)
    assert verdict.word == "equal", verdict.reason


@pytest.mark.timeout(300)
def test_a_stop_within_an_epoch_keeps_the_shards_of_a_moving_average(hunt: Hunt) -> None:
    """The state of stochastic weight averaging was moved to the host, and each rank has a shard: refused late."""
    spread = Spread("fsdp", 2, (("batch_size_is", "global"), ("timeout_s", 20)))
    verdict = hunt.judge(Case(callbacks=("swa",), options=Options(max_steps=5)), spread)
    assert verdict.accepted, verdict.reason  # a `test` afterwards, for which the callback copies the module, is refused


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
    from . import cases

    assert eval(brief(case), vars(cases)) == case
    assert eval(repr(spread), vars(cases)) == spread
