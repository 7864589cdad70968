"""A drawn training, described by plain values: its `repr` is all that is needed to run it again.

Every field has a default, so that a failing case can be reduced to the fields that matter.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
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


@dataclass(frozen=True)
class Case:
    """A training. The dtype is torch's default while it runs; `watch` says how many hooks the callback overrides."""

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


@dataclass(frozen=True)
class Spread:
    """Who trains: `stock` is `pl.Trainer`, everything else is Evener's with the strategy of this name."""

    kind: str = "single_device"
    devices: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def num_processes(self) -> int:
        if self.kind in ("ddp", "balanced_ddp"):
            return self.devices // dict(self.options).get("devices_per_process", 1)
        return self.devices // 2 if "ddp" in self.kind else 1


def brief(value: Any) -> str:
    """The description of a case without the fields that have their defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(brief(item) for item in value)}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    plain = type(value)()
    differing = [field.name for field in fields(value) if getattr(value, field.name) != getattr(plain, field.name)]
    return f"{type(value).__name__}({', '.join(f'{name}={brief(getattr(value, name))}' for name in differing)})"


def simpler(value: Any) -> list[Any]:
    """Descriptions that differ in one place, which is plainer."""
    if isinstance(value, tuple):
        found = [value[:i] + value[i + 1 :] for i in range(len(value))]
        for i, item in enumerate(value):
            found += [(*value[:i], one, *value[i + 1 :]) for one in simpler(item)] if is_dataclass(item) else []
        return found
    if not is_dataclass(value):
        return []
    plain, found = type(value)(), []
    for field in fields(value):
        mine, default = getattr(value, field.name), getattr(plain, field.name)
        if mine == default:
            continue
        found.append(replace(value, **{field.name: default}))
        if is_dataclass(mine) or isinstance(mine, tuple):
            found += [replace(value, **{field.name: one}) for one in simpler(mine)]
    return found
