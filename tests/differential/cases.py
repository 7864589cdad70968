"""A drawn training, described by plain values: its `repr` is all that is needed to run it again.

Every field has a default, so that a failing case can be reduced to the fields that matter, and what Hypothesis draws it
from. The plain choice comes first: Hypothesis shrinks towards it.
"""

# ruff: noqa: RUF009  # frozen defaults, of which a field keeps what it is drawn from
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from hypothesis import strategies as st

from . import batches, loading, metering, observe, optimizers, subject


def drawn(default: Any, strategy: st.SearchStrategy[Any]) -> Any:
    return field(default=default, metadata={"from": strategy})


def one_of(plain: Any, *others: Any) -> Any:
    return drawn(plain, st.sampled_from([plain, *others]))


def often(plain: Any, *others: Any, times: int = 2) -> st.SearchStrategy[Any]:
    """The plain value, or, less often, one of the others."""
    return st.one_of(*[st.just(plain)] * times, st.sampled_from([plain, *others]))


def mostly(plain: Any, *others: Any, times: int = 2) -> Any:
    return drawn(plain, often(plain, *others, times=times))


def some(values: tuple[str, ...], most: int) -> st.SearchStrategy[Any]:
    """None of the values, or a few."""
    few = st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True).map(tuple)
    return st.one_of(st.just(()), few)


def sources(kind: type) -> dict[str, st.SearchStrategy[Any]]:
    """What the fields of a dataclass are drawn from."""
    return {one.name: one.metadata["from"] for one in fields(kind) if "from" in one.metadata}


def draws(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(kind, **sources(kind))


@dataclass(frozen=True)
class Batches:
    """What a batch looks like."""

    shape: str = mostly(*batches.SHAPES)
    extras: tuple[str, ...] = drawn((), some(batches.EXTRAS, 2))
    extras_first: bool = drawn(False, st.booleans())
    boxes: tuple[int, ...] = one_of((2, 1, 3), (2, 2, 1, 2, 3, 1, 2, 2), (2,), (4,), (1,), (3, 3, 4))


@dataclass(frozen=True)
class Loading:
    """Who makes the batches."""

    kind: str = mostly(*loading.KINDS)
    num: int = one_of(9, 8, 6, 5, 12, 1)
    batch_size: int = one_of(4, 2, 3, 6, 1)
    drop_last: bool = mostly(False, True)
    second: tuple[int, int] = one_of((9, 4), (24, 6), (6, 4), (5, 3), (12, 2))
    eval_kind: str = mostly(*loading.EVAL_KINDS)
    eval_num: int = one_of(9, 8, 5, 1)
    eval_batch_size: int = one_of(4, 3, 6)
    given_by: str = mostly("arguments", "module", "datamodule")


@dataclass(frozen=True)
class Net:
    """What is trained, and what is peculiar about it."""

    kind: str = mostly(*subject.NETS)
    peculiar: tuple[str, ...] = drawn((), some(subject.PECULIAR, 3))
    hooks: str = mostly(*subject.HOOKS)


@dataclass(frozen=True)
class Log:
    """One call of `self.log`."""

    value: str = "loss"
    where: str = one_of("train", "eval")
    style: str = "object"
    on_step: bool | None = None
    on_epoch: bool | None = None
    batch_size: str = one_of("none", "true", "constant", "one")
    sync_dist: bool = mostly(True, False)
    prog_bar: bool = drawn(False, st.booleans())
    as_dict: bool = mostly(False, True)


@dataclass(frozen=True)
class Returns:
    """What the steps return."""

    train: str = mostly(*subject.TRAIN_OUTPUTS)
    evaluation: str = mostly(*subject.EVAL_OUTPUTS)
    predict: str = mostly(*subject.PREDICTIONS)


@dataclass(frozen=True)
class Optimization:
    """Optimizer and scheduler."""

    optimizer: str = mostly(*optimizers.OPTIMIZERS, *optimizers.MANUAL, *optimizers.SPECIAL)
    scheduler: str = mostly(*optimizers.SCHEDULERS)


@dataclass(frozen=True)
class Options:
    """Arguments of the trainer."""

    max_epochs: int = one_of(2, 1, 3)
    accumulate_grad_batches: int = mostly(1, 2, 3)
    gradient_clip_val: float | None = mostly(None, 0.05, 0.5)
    gradient_clip_algorithm: str = one_of("norm", "value")
    limit_train_batches: float | int | None = mostly(None, 2, 0.5, times=4)
    limit_val_batches: float | int | None = mostly(None, 1, 0.5, 0, times=4)
    max_steps: int = mostly(-1, 3, 1, times=4)
    precision: str = mostly("32-true", "64-true", "bf16-mixed", times=6)
    val_check_interval: float | int | None = mostly(None, 1, 2, 0.5, times=4)
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = mostly(0, 2)
    overfit_batches: float | int = mostly(0, 1, times=10)
    log_every_n_steps: int = mostly(1, 2, 50)
    reload_dataloaders_every_n_epochs: int = mostly(0, 1, times=4)
    exact_accumulation: bool = mostly(False, True)
    detect_nonfinite: str = mostly("off", "raise", "skip_step", times=4)


@st.composite
def logs(draw: Any) -> Log:
    """A call of `self.log` that has a meaning for a batch in parts."""
    own, metric = sources(Log), tuple(metering.METRICS)
    value = draw(st.one_of(st.sampled_from(tuple(subject.LOGGED)), st.sampled_from(metric)))
    styles = [s for s in metering.STYLES if s != "value" or value in metering.VALUE_STYLE]
    styles = [s for s in styles if value not in metering.WHOLE_ONLY or "epoch" in s]
    useful = [(None, None), (True, None), (None, True), (True, True), (False, True), (True, False)]
    on_step, on_epoch = draw(st.sampled_from(useful))
    where, style = draw(own.pop("where")), draw(st.sampled_from(styles)) if value in metric else "object"
    if value in metric:
        del own["as_dict"]
    return Log(value, where, style, on_step, on_epoch, **{name: draw(one) for name, one in own.items()})


def _zipped(one: Batches) -> Batches:
    return Batches("zip", (), False, one.boxes) if one.shape == "zip" else one


@dataclass(frozen=True)
class Case:
    """A training. The dtype is torch's default while it runs; `watch` says how many hooks the callback overrides.

    `before` and `after` are what the trainer does besides `fit` and `test`; with `resume_after` the run is saved after
    as many steps, and goes on in a new trainer.
    """

    batches: Batches = drawn(Batches(), draws(Batches).map(_zipped))
    loading: Loading = drawn(Loading(), draws(Loading))
    net: Net = drawn(Net(), draws(Net))
    logs: tuple[Log, ...] = drawn((), st.lists(logs(), max_size=3).map(tuple))
    returns: Returns = drawn(Returns(), draws(Returns))
    optimization: Optimization = drawn(Optimization(), draws(Optimization))
    callbacks: tuple[str, ...] = drawn((), st.one_of(st.just(()), some(observe.CALLBACKS, 2)))
    options: Options = drawn(Options(), draws(Options))
    dtype: str = mostly("float64", "float32", times=3)
    watch: str = one_of("usual", "light", "full")
    before: str = mostly("nothing", "validate", "test", "predict", times=4)
    after: str = mostly("nothing", "fit", times=4)
    resume_after: int = mostly(0, 1, 2, 4, times=6)


@dataclass(frozen=True)
class Spread:
    """Who trains: `stock` is `pl.Trainer`, everything else is Evener's with the strategy of this name."""

    kind: str = "single_device"
    devices: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_of_ranks(self) -> bool:
        """Whether each process sees its own part of a batch."""
        return ("ddp" in self.kind or self.kind == "fsdp") and "global_view" not in dict(self.options)

    @property
    def num_processes(self) -> int:
        if self.kind in ("ddp", "balanced_ddp", "fsdp"):
            return self.devices // dict(self.options).get("devices_per_process", 1)
        return self.devices // 2 if "ddp" in self.kind else 1


def brief(value: Any) -> str:
    """The description of a case without the fields that have their defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(brief(item) for item in value)}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    plain = vars(type(value)())
    differing = [f"{name}={brief(mine)}" for name, mine in vars(value).items() if mine != plain[name]]
    return f"{type(value).__name__}({', '.join(differing)})"


def simpler(value: Any) -> list[Any]:
    """Descriptions that differ in one place, which is plainer."""
    if isinstance(value, tuple):
        found = [value[:i] + value[i + 1 :] for i in range(len(value))]
        for i, item in enumerate(value):
            found += [(*value[:i], one, *value[i + 1 :]) for one in simpler(item)] if is_dataclass(item) else []
        return found
    if not is_dataclass(value):
        return []
    found = []
    for name, default in vars(type(value)()).items():
        mine = getattr(value, name)
        if mine != default:
            found.append(replace(value, **{name: default}))
            found += [replace(value, **{name: one}) for one in simpler(mine) if one or not default]
    return found


CASES = draws(Case)
RECOMPUTED, SHARDED = (("recompute", ("net",)),), (("shard_optimizer", True),)
CHUNKS = (("gpu0_chunk", 0), ("gpu0_chunk", 1), ("weights", (1, 2, 2)), ("weights", (0, 1, 3)))
RANKS = (("batch_size_is", "global"), ("timeout_s", 6))


def spreads(kind: str, devices: Any, *options: Any, common: Any = ()) -> st.SearchStrategy[Spread]:
    """A strategy with numbers of devices, options that it always has, and others, of which it has one or none."""
    own = often(*options, times=1)
    return st.builds(lambda num, more: Spread(kind, num, (*common, *more)), st.sampled_from(devices), own)


SPREADS: dict[str, st.SearchStrategy[Spread]] = {
    "single_device": st.just(Spread()),
    "dp": spreads("dp", [2, 3, 4], (), (("threads", True),), (("submodule", "net"),)),
    "balanced_dp": st.builds(
        Spread, st.just("balanced_dp"), st.just(3),
        often(*[((name, value),) for name, value in CHUNKS], (), times=1),
    ),
    "model_parallel": st.builds(
        lambda devices, num, more: Spread("model_parallel", devices, (("num_microbatches", num), *more)),
        st.sampled_from([2, 3]), st.sampled_from([2, 3, 1]),
        often((), (("deterministic", True),), (("output_device", "first"),), times=1),
    ),
    "ddp": spreads(
        "ddp", [2, 3], (), (("find_unused_parameters", True),), (("static_graph", True),),
        (("gradient_as_bucket_view", True),), common=RANKS,
    ),
    "ddp_global_view": st.builds(
        lambda num, size_is: Spread("ddp", num, (("batch_size_is", size_is), ("timeout_s", 6), ("global_view", True))),
        st.sampled_from([2, 3]), often("global", "per_device"),
    ),
    "ddp_per_device": st.just(Spread("ddp", 2, (("batch_size_is", "per_device"), ("timeout_s", 6)))),
    "ddp_replicas": st.just(Spread("ddp", 4, (*RANKS, ("devices_per_process", 2)))),
    "balanced_ddp": st.builds(
        lambda weights: Spread("balanced_ddp", 2, (("timeout_s", 6), ("weights", weights))),
        st.sampled_from([(1, 3), (2, 1)]),
    ),
    "fsdp": spreads(
        "fsdp", [2, 3], (("shard", ()),), (("find_unused_parameters", True),), (), (("reshard_after_forward", False),),
        common=RANKS,
    ),
    "recompute": st.sampled_from(
        [Spread(options=RECOMPUTED), Spread("dp", 2, RECOMPUTED), Spread("ddp", 2, (*RANKS, *RECOMPUTED))]
    ),
    "shard_optimizer": st.sampled_from([Spread("ddp", num, (*RANKS, *SHARDED)) for num in (2, 3)]),
    "ddp_model_parallel": st.just(
        Spread("ddp_model_parallel", 4, (*RANKS, ("model_parallel_size", 2), ("num_microbatches", 2)))
    ),
}  # fmt: skip
