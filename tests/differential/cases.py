"""A drawn training, described by plain values: its `repr` is all that is needed to run it again.

Every field has a default, so that a failing case can be reduced to the fields that matter.
"""

from dataclasses import dataclass, is_dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Batches:
    """What a batch looks like."""

    shape: str = "tuple"
    extras: tuple[str, ...] = ()
    extras_first: bool = False
    boxes: tuple[int, ...] = (2, 1, 3)


@dataclass(frozen=True)
class Loading:
    """Who makes the batches."""

    kind: str = "plain"
    num: int = 9
    batch_size: int = 4
    drop_last: bool = False
    second: tuple[int, int] = (9, 4)
    eval_kind: str = "plain"
    eval_num: int = 9
    eval_batch_size: int = 4
    given_by: str = "arguments"


@dataclass(frozen=True)
class Net:
    """What is trained, and what is peculiar about it."""

    kind: str = "mlp"
    peculiar: tuple[str, ...] = ()
    hooks: str = "none"


@dataclass(frozen=True)
class Log:
    """One call of `self.log`."""

    value: str = "loss"
    where: str = "train"
    style: str = "object"
    on_step: bool | None = None
    on_epoch: bool | None = None
    batch_size: str = "none"
    sync_dist: bool = True
    prog_bar: bool = False
    as_dict: bool = False


@dataclass(frozen=True)
class Returns:
    """What the steps return."""

    train: str = "tensor"
    evaluation: str = "none"
    predict: str = "tensor"


@dataclass(frozen=True)
class Optimization:
    """Optimizer and scheduler."""

    optimizer: str = "sgd"
    scheduler: str = "none"


@dataclass(frozen=True)
class Options:
    """Arguments of the trainer."""

    max_epochs: int = 2
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    limit_train_batches: float | int | None = None
    limit_val_batches: float | int | None = None
    max_steps: int = -1
    precision: str = "32-true"
    val_check_interval: float | int | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 0
    overfit_batches: float | int = 0
    log_every_n_steps: int = 1
    reload_dataloaders_every_n_epochs: int = 0
    exact_accumulation: bool = False
    detect_nonfinite: str = "off"


@dataclass(frozen=True)
class Case:
    """A training. The dtype is torch's default while it runs; `watch` says how many hooks the callback overrides.

    `before` and `after` are what the trainer does besides `fit` and `test`; with `resume_after` the run is saved after
    as many steps, and goes on in a new trainer.
    """

    batches: Batches = Batches()
    loading: Loading = Loading()
    net: Net = Net()
    logs: tuple[Log, ...] = ()
    returns: Returns = Returns()
    optimization: Optimization = Optimization()
    callbacks: tuple[str, ...] = ()
    options: Options = Options()
    dtype: str = "float64"
    watch: str = "usual"
    before: str = "nothing"
    after: str = "nothing"
    resume_after: int = 0


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
