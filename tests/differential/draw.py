"""Hypothesis strategies that draw cases. The plain choice comes first: Hypothesis shrinks towards it."""

from typing import Any

from hypothesis import strategies as st

from . import batches, loading, metering, observe, optimizers, subject
from .cases import Batches, Case, Loading, Log, Net, Optimization, Options, Returns, Spread


def mostly(plain: Any, *others: Any, times: int = 2) -> st.SearchStrategy[Any]:
    """The plain value, or, less often, one of the others."""
    return st.one_of(*[st.just(plain)] * times, st.sampled_from([plain, *others]))


def some(values: tuple[str, ...], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    """None of the values, or a few."""
    few = st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True).map(tuple)
    return st.one_of(st.just(()), few)


BATCHES = st.builds(
    Batches,
    shape=mostly(*batches.SHAPES),
    extras=some(batches.EXTRAS, 2),
    extras_first=st.booleans(),
    boxes=st.sampled_from([(2, 1, 3), (2, 2, 1, 2, 3, 1, 2, 2), (2,), (4,), (1,), (3, 3, 4)]),
).map(lambda one: Batches("zip", (), False, one.boxes) if one.shape == "zip" else one)

LOADING = st.builds(
    Loading,
    kind=mostly(*loading.KINDS),
    num=st.sampled_from([9, 8, 6, 5, 12, 1]),
    batch_size=st.sampled_from([4, 2, 3, 6, 1]),
    drop_last=mostly(False, True),
    second=st.sampled_from([(9, 4), (24, 6), (6, 4), (5, 3), (12, 2)]),
    eval_kind=mostly(*loading.EVAL_KINDS),
    eval_num=st.sampled_from([9, 8, 5, 1]),
    eval_batch_size=st.sampled_from([4, 3, 6]),
    given_by=mostly("arguments", "module", "datamodule"),
)

NETS = st.builds(Net, kind=mostly(*subject.NETS), peculiar=some(subject.PECULIAR, 3), hooks=mostly(*subject.HOOKS))


@st.composite
def logs(draw: Any) -> Log:
    """A call of `self.log` that has a meaning for a batch in parts."""
    value = draw(st.one_of(st.sampled_from(tuple(subject.LOGGED)), st.sampled_from(tuple(metering.METRICS))))
    styles = [s for s in metering.STYLES if s != "value" or value in metering.VALUE_STYLE]
    styles = [s for s in styles if value not in metering.WHOLE_ONLY or "epoch" in s]
    useful = [(None, None), (True, None), (None, True), (True, True), (False, True), (True, False)]
    on_step, on_epoch = draw(st.sampled_from(useful))
    return Log(
        value=value,
        where=draw(st.sampled_from(["train", "eval"])),
        style=draw(st.sampled_from(styles)) if value in metering.METRICS else "object",
        on_step=on_step,
        on_epoch=on_epoch,
        batch_size=draw(st.sampled_from(["none", "true", "constant", "one"])),
        sync_dist=draw(mostly(True, False)),
        prog_bar=draw(st.booleans()),
        as_dict=draw(mostly(False, True)) if value not in metering.METRICS else False,
    )


RETURNS = st.builds(
    Returns,
    train=mostly(*subject.TRAIN_OUTPUTS),
    evaluation=mostly(*subject.EVAL_OUTPUTS),
    predict=mostly(*subject.PREDICTIONS),
)
OPTIMIZATIONS = st.builds(
    Optimization,
    optimizer=mostly(*optimizers.OPTIMIZERS, *optimizers.MANUAL, *optimizers.SPECIAL),
    scheduler=mostly(*optimizers.SCHEDULERS),
)
OPTIONS = st.builds(
    Options,
    max_epochs=st.sampled_from([2, 1, 3]),
    accumulate_grad_batches=mostly(1, 2, 3),
    gradient_clip_val=mostly(None, 0.05, 0.5),
    gradient_clip_algorithm=st.sampled_from(["norm", "value"]),
    limit_train_batches=mostly(None, 2, 0.5, times=4),
    limit_val_batches=mostly(None, 1, 0.5, 0, times=4),
    max_steps=mostly(-1, 3, 1, times=4),
    precision=mostly("32-true", "64-true", "bf16-mixed", times=6),
    val_check_interval=mostly(None, 1, 2, 0.5, times=4),
    num_sanity_val_steps=mostly(0, 2),
    overfit_batches=mostly(0, 1, times=10),
    log_every_n_steps=mostly(1, 2, 50),
    reload_dataloaders_every_n_epochs=mostly(0, 1, times=4),
    exact_accumulation=mostly(False, True),
    detect_nonfinite=mostly("off", "raise", "skip_step", times=4),
)


CASES = st.builds(
    Case,
    batches=BATCHES,
    loading=LOADING,
    net=NETS,
    logs=st.lists(logs(), max_size=3).map(tuple),
    returns=RETURNS,
    optimization=OPTIMIZATIONS,
    callbacks=st.one_of(st.just(()), some(observe.CALLBACKS, 2)),
    options=OPTIONS,
    dtype=mostly("float64", "float32", times=3),
    watch=st.sampled_from(["usual", "light", "full"]),
    before=mostly("nothing", "validate", "test", "predict", times=4),
    after=mostly("nothing", "fit", times=4),
    resume_after=mostly(0, 1, 2, 4, times=6),
)

RECOMPUTED = (("recompute", ("net",)),)
SHARDED = (("shard_optimizer", True),)
RANKS = (("batch_size_is", "global"), ("timeout_s", 6))


def options(*choices: tuple[tuple[str, Any], ...]) -> st.SearchStrategy[Any]:
    return mostly(*choices, times=1)


SPREADS: dict[str, st.SearchStrategy[Spread]] = {
    "single_device": st.just(Spread()),
    "dp": st.builds(
        Spread, st.just("dp"), st.sampled_from([2, 3, 4]), options((), (("threads", True),), (("submodule", "net"),))
    ),
    "balanced_dp": st.builds(
        Spread, st.just("balanced_dp"), st.just(3),
        options((("gpu0_chunk", 0),), (("gpu0_chunk", 1),), (("weights", (1, 2, 2)),), (("weights", (0, 1, 3)),), ()),
    ),
    "model_parallel": st.builds(
        lambda devices, num, more: Spread("model_parallel", devices, (("num_microbatches", num), *more)),
        st.sampled_from([2, 3]), st.sampled_from([2, 3, 1]),
        options((), (("deterministic", True),), (("output_device", "first"),)),
    ),
    "ddp": st.builds(
        lambda devices, more: Spread("ddp", devices, (*RANKS, *more)), st.sampled_from([2, 3]),
        options(
            (), (("find_unused_parameters", True),), (("static_graph", True),), (("gradient_as_bucket_view", True),)
        ),
    ),
    "ddp_global_view": st.builds(
        lambda num, size_is: Spread("ddp", num, (("batch_size_is", size_is), ("timeout_s", 6), ("global_view", True))),
        st.sampled_from([2, 3]), mostly("global", "per_device"),
    ),
    "ddp_per_device": st.just(Spread("ddp", 2, (("batch_size_is", "per_device"), ("timeout_s", 6)))),
    "ddp_replicas": st.just(Spread("ddp", 4, (*RANKS, ("devices_per_process", 2)))),
    "balanced_ddp": st.builds(
        lambda weights: Spread("balanced_ddp", 2, (("timeout_s", 6), ("weights", weights))),
        st.sampled_from([(1, 3), (2, 1)]),
    ),
    "fsdp": st.builds(
        lambda devices, more: Spread("fsdp", devices, (*RANKS, *more)), st.sampled_from([2, 3]),
        options((("shard", ()),), (("find_unused_parameters", True),), (), (("reshard_after_forward", False),)),
    ),
    "recompute": st.sampled_from(
        [Spread(options=RECOMPUTED), Spread("dp", 2, RECOMPUTED), Spread("ddp", 2, (*RANKS, *RECOMPUTED))]
    ),
    "shard_optimizer": st.sampled_from([Spread("ddp", 2, (*RANKS, *SHARDED)), Spread("ddp", 3, (*RANKS, *SHARDED))]),
    "ddp_model_parallel": st.just(
        Spread("ddp_model_parallel", 4, (*RANKS, ("model_parallel_size", 2), ("num_microbatches", 2)))
    ),
}  # fmt: skip
