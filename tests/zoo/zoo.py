"""Train a case under a strategy, compare it with stock Lightning on one device, and give a verdict.

A case is a module that others wrote, or metrics of theirs in a module of ours, with small data that is made here. The
two verdicts that are allowed: equal to 1e-10 in float64, or refused in one sentence before the first optimizer step.
"""

import importlib
import logging
import math
import numbers
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks_unchecked
from pytorch_lightning.loggers.logger import Logger
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import evener.strategies
import evener.trainer
from evener import strategies as S
from evener.trainer import Trainer

TOLERANCE = 1e-10
OURS = tuple(str(Path(path).resolve()) for package in (evener.strategies, evener.trainer) for path in package.__path__)


@dataclass(frozen=True)
class Plan:
    """A strategy, by the trainer that runs it and the number of its devices."""

    strategy: Callable[[], Any]
    num_devices: int = 1
    trainer: Callable[..., Any] = Trainer
    num_ranks: int = 1


PLANS: dict[str, Plan] = {
    "lightning": Plan(lambda: "auto", trainer=pl.Trainer),
    "single_device": Plan(lambda: S.SingleDeviceStrategy()),
    "dp": Plan(lambda: S.DataParallelStrategy(), 2),
    "balanced_dp": Plan(lambda: S.BalancedDataParallelStrategy(gpu0_chunk=0), 2),
    "ddp": Plan(lambda: S.DDPStrategy(batch_size_is="global"), 2, num_ranks=2),
    "model_parallel": Plan(lambda: S.ModelParallelStrategy(num_microbatches=2), 2),
}
STRATEGIES = [name for name in PLANS if name != "lightning"]


@dataclass
class Case:
    """A module and the loaders it trains and validates on.

    Attributes:
        module: makes the module; called with torch's generator seeded and float64 as the default type.
        train: makes the loader to train on.
        val: makes the loader to validate on, if any.
        predict: makes the loader to predict on, if any.
        options: further arguments of the trainer.
        packages: packages without which the case is skipped.
        tolerance: absolute and relative difference that is allowed; wider where a library computes in float32.
    """

    module: Callable[[], pl.LightningModule]
    train: Callable[[], Any]
    val: Callable[[], Any] | None = None
    predict: Callable[[], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    tolerance: float = TOLERANCE


@dataclass
class Record:
    """Values of a training that everybody can see, by name."""

    values: dict[str, Any]
    num_steps: int
    tolerance: float


@dataclass
class Failure:
    """An exception that ended a training.

    Attributes:
        by_name: whether evener itself raised it, rather than something that it called.
        num_steps: optimizer steps that were made before it.
        trace: its traceback.
        time: seconds on the machine's clock; the first of several ranks to fail had the cause.
    """

    kind: str
    message: str
    by_name: bool
    num_steps: int
    trace: str = ""
    time: float = 0.0


class Word(str, Enum):
    """The verdicts; the last four are defects."""

    EQUAL = "equal"
    REFUSED = "refused"
    UNUSABLE = "not on Lightning either"
    WRONG = "WRONG"
    LATE = "REFUSED LATE"
    CRASHED = "CRASHED"
    HUNG = "HUNG"


@dataclass
class Verdict:
    """What became of a case under a strategy."""

    word: Word
    detail: str = ""

    @property
    def holds(self) -> bool:
        """Whether law 1 holds."""
        return self.word in (Word.EQUAL, Word.REFUSED, Word.UNUSABLE)

    def __str__(self) -> str:
        return f"{self.word.value}: {self.detail}" if self.detail else self.word.value


class Seen(pl.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_steps = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.num_steps += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Kept(Logger):
    """Keeps all that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.lines |= {f"{key} at step {step}": float(value) for key, value in metrics.items() if key != "epoch"}


def train(make: Callable[[], Case], plan_name: str) -> Record | Failure:
    """Train a case; runs in every rank of strategies that have ranks."""
    plan = PLANS[plan_name]
    seen, kept = Seen(), Kept()
    before = torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn of their own matters
        quiet()
        torch.set_default_dtype(torch.float64)
        try:
            case = make()
            torch.manual_seed(7)
            module = case.module()
            trainer = plan.trainer(
                strategy=plan.strategy(), devices=plan.num_devices, accelerator="cpu", callbacks=[seen], logger=kept,
                **{**OPTIONS, **case.options},
            )  # fmt: skip
            trainer.fit(module, case.train(), case.val() if case.val else None)
            values = everything(trainer, module, seen, kept)
            if case.predict:
                predictions = plain(trainer.predict(module, case.predict()))
                values |= {"predictions": predictions, "predictions in order": joined(predictions)}
            return Record(values, seen.num_steps, case.tolerance)
        except Exception as exc:  # noqa: BLE001  # a verdict, whatever it is
            return failure(exc, seen.num_steps)
        finally:
            torch.set_default_dtype(before)


OPTIONS: dict[str, Any] = {
    "max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def quiet() -> None:
    for name in ("pytorch_lightning", "lightning_fabric", "lightning", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def everything(trainer: Any, module: pl.LightningModule, seen: Seen, kept: Kept) -> dict[str, Any]:
    """All that a user can see of a training."""
    final = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {
        "weight": {name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
        "loss_step": seen.losses,
        "logged": kept.lines,
        "callback_metrics": final,
        "computed": getattr(module, "computed", {}),
    }


def failure(exc: BaseException, num_steps: int) -> Failure:
    frames = traceback.extract_tb(exc.__traceback__)
    innermost = str(Path(frames[-1].filename).resolve()) if frames else ""
    by_name = isinstance(exc, S.ConfigError) or innermost.startswith(OURS)
    trace = "".join(traceback.format_exception(exc))
    return Failure(type(exc).__name__, str(exc).strip(), by_name, num_steps, trace, time.monotonic())


def judge_all(
    makes: Sequence[Callable[[], Case]], plan_name: str, expected: Sequence[Record | Failure]
) -> list[Verdict]:
    """Verdicts of many cases; strategies with ranks start them once for all."""
    usable = [make for make, record in zip(makes, expected, strict=True) if isinstance(record, Record)]
    found = iter(outcomes(usable, plan_name))
    return [
        compare(next(found), record, PLANS[plan_name].num_ranks > 1)
        if isinstance(record, Record)
        else Verdict(Word.UNUSABLE, one_line(f"{record.kind}: {record.message}"))
        for record in expected
    ]


def outcomes(makes: Sequence[Callable[[], Case]], plan_name: str) -> list[Record | Failure | RankError]:
    """The trainings' records, of several ranks rank 0's; or the failure of the rank that failed first."""
    if PLANS[plan_name].num_ranks == 1:
        return [train(make, plan_name) for make in makes]
    done: list[Record | Failure | RankError] = []
    while len(done) < len(makes):
        done += _outcomes_of_one_launch(makes[len(done) :], plan_name)
    return done


def _outcomes_of_one_launch(makes: Sequence[Callable[[], Case]], plan_name: str) -> list[Record | Failure | RankError]:
    """Those up to the first failure, which ends the ranks."""
    timeout_s = 40 + 4 * len(makes)
    ranks = run_ranks_unchecked(train_all, PLANS[plan_name].num_ranks, makes, plan_name, timeout_s=timeout_s)
    errors = [rank for rank in ranks if isinstance(rank, RankError)]
    if errors and len(makes) == 1:
        return errors[:1]
    if errors:  # nobody knows in which case: by halves
        return _outcomes_of_one_launch(makes[: len(makes) // 2], plan_name)
    return [min(case, key=_time) for case in zip(*ranks, strict=False)]


def _time(outcome: Record | Failure) -> float:
    return outcome.time if isinstance(outcome, Failure) else math.inf


def train_all(makes: Sequence[Callable[[], Case]], plan_name: str) -> list[Record | Failure]:
    """Train one case after the other until one fails: its rank ends then, so that the others learn of it."""
    done: list[Record | Failure] = []
    for make in makes:
        done.append(train(make, plan_name))
        if isinstance(done[-1], Failure):
            break
    return done


def compare(found: Record | Failure | RankError, expected: Record, on_ranks: bool = False) -> Verdict:
    """The verdict of two trainings."""
    if isinstance(found, RankError):
        hung = "Thread 0x" in str(found)  # killed, after its stacks were printed
        return Verdict(Word.HUNG, "no rank finished in time" if hung else one_line(str(found)))
    if isinstance(found, Failure):
        text = one_line(f"{found.kind}: {found.message}")
        if not found.by_name:
            return Verdict(Word.CRASHED, f"{text} (after {found.num_steps} optimizer steps)")
        if found.num_steps:
            return Verdict(Word.LATE, f"{text} (after {found.num_steps} optimizer steps)")
        return Verdict(Word.REFUSED, text)
    wanted = {key: value for key, value in expected.values.items() if not (on_ranks and key == "predictions")}
    seen = {key: value for key, value in found.values.items() if key in wanted}
    differences = list(differing("", seen, wanted, expected.tolerance))
    if not differences:
        return Verdict(Word.EQUAL)
    if on_ranks and all("_step" in name for name, *_ in differences):
        return Verdict(Word.EQUAL, "but for the values of single steps, which are rank 0's own")
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    name, got, want = max(differences, key=_severity)
    return Verdict(Word.WRONG, f"{name} is {got} instead of {want}{more}")


def _severity(difference: tuple[str, Any, Any]) -> tuple[bool, bool]:
    """A weight counts most, then what is logged of an epoch, then of a step."""
    name = difference[0]
    return name.startswith("weight"), "_step" not in name


def differing(name: str, found: Any, expected: Any, tolerance: float) -> Any:
    """(name, found, expected) of every number that differs by more than the tolerance."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if found.shape != expected.shape:
            yield name, f"of shape {tuple(found.shape)}", f"{tuple(expected.shape)}"
        elif not torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            worst = (found.double() - expected.double()).abs().nan_to_num(math.inf).argmax()
            yield name, number(found.flatten()[worst]), number(expected.flatten()[worst])
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                yield f"{name} {key}".strip(), found.get(key, "missing"), expected.get(key, "absent")
            else:
                yield from differing(f"{name} {key}".strip(), found[key], expected[key], tolerance)
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(expected):
            yield name, f"{len(found)} long", f"{len(expected)}"
        else:
            for i, (left, right) in enumerate(zip(found, expected, strict=True)):
                yield from differing(f"{name} {i}", left, right, tolerance)
    elif isinstance(expected, numbers.Real) and isinstance(found, numbers.Real):
        same = math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        if not same and not (math.isnan(found) and math.isnan(expected)):
            yield name, number(found), number(expected)
    elif type(found) is not type(expected) or (not hasattr(expected, "__dict__") and found != expected):
        yield name, one_line(repr(found)), one_line(repr(expected))


def number(value: Any) -> str:
    return f"{float(value):.8g}"


def one_line(text: str, most: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def plain(value: Any) -> Any:
    """Containers of other libraries as dicts and lists, so that they can be pickled and compared."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


def joined(predictions: list[Any]) -> Any:
    """Predictions of all samples: ranks cut batches otherwise than one device does, and keep the order."""
    if not predictions or isinstance(predictions[0], list):
        return [sample for batch in predictions for sample in batch]
    columns, specs = zip(*(tree_flatten(batch) for batch in predictions), strict=True)
    if len(set(map(str, specs))) > 1:
        return predictions
    return tree_unflatten([torch.cat(column) for column in zip(*columns, strict=True)], specs[0])


class Zoo:
    """Verdicts of many cases, each worked out once.

    Args:
        names: names of the cases.
        case: makes a case from its name; a function of a module, since ranks import it.
    """

    GROUP = 12
    """Number of cases for which ranks are started once."""

    def __init__(self, names: Sequence[str], case: Callable[[str], Case]) -> None:
        self.names, self._case = list(names), case
        self._expected: dict[str, Record | Failure] = {}
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    def expected(self, name: str) -> Record | Failure:
        """What stock Lightning gives on one device."""
        if name not in self._expected:
            self._expected[name] = train(partial(self._case, name), "lightning")
        return self._expected[name]

    def verdict(self, name: str, plan_name: str) -> Verdict:
        """The verdict of one case under one strategy; where that has ranks, its neighbours are run along."""
        if (name, plan_name) not in self._verdicts:
            first = self.names.index(name) // self.GROUP * self.GROUP
            group = self.names[first : first + self.GROUP] if PLANS[plan_name].num_ranks > 1 else [name]
            makes, expected = [partial(self._case, one) for one in group], [self.expected(one) for one in group]
            for one, verdict in zip(group, judge_all(makes, plan_name, expected), strict=True):
                self._verdicts[one, plan_name] = verdict
        return self._verdicts[name, plan_name]

    def check(self, name: str, plan_name: str) -> None:
        """Fail unless law 1 holds; skip what stock Lightning does not run either."""
        verdict = self.verdict(name, plan_name)
        if verdict.word is Word.UNUSABLE:
            pytest.skip(str(verdict))
        assert verdict.holds, f"{name} under {plan_name}: {verdict}"


def needs(*packages: str, allow_module_level: bool = False) -> None:
    """Skip the test where a package is missing, with the reason."""
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as exc:  # noqa: BLE001  # compiled parts that do not load raise anything
            reason = f'{package} is not there ({type(exc).__name__}: {exc}); pip install -e ".[zoo]"'
            pytest.skip(reason, allow_module_level=allow_module_level)
