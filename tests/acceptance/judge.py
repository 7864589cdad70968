"""Train a case under a plan, in a process that stays alive for all of them, and compare it with one device."""

import json
import logging
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import late_device
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from differential.pool import Group
from lightning_fabric.utilities import device_parser
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import evener.strategies
import evener.trainer
from evener import strategies as S
from evener.trainer import Trainer

from .case import REMEDIES, Case, all_cases, has_remedy

RELATIVE, ABSOLUTE = 1e-9, 1e-11
OURS = tuple(str(Path(path).resolve()) for package in (evener.strategies, evener.trainer) for path in package.__path__)
REFERENCE, STOCK = "single_device", "lightning"


@dataclass(frozen=True)
class Plan:
    """A strategy and the number of its devices; the loader's batch is the global batch under each."""

    strategy: Callable[..., Any]
    devices: int = 1
    ranks: int = 1

    def made(self, accelerator: str, **options: Any) -> Any:
        """The strategy; one of a single process is given its devices by name, and repeats those that there are."""
        if accelerator == "cpu" or self.ranks > 1:
            return self.strategy(**options | ({"backend": "gloo"} if accelerator == "cuda" else {}))
        num = torch.get_device_module(accelerator).device_count()
        names = [f"{accelerator}:{i % num}" for i in range(self.devices)]
        return self.strategy(**{"devices": names, **options} if self.devices > 1 else {"device": names[0], **options})

    def indices(self, accelerator: str) -> Any:
        """The trainer's `devices`; ranks share the GPUs that there are, by gloo."""
        if accelerator != "cuda" or self.ranks == 1:
            return self.devices if accelerator == "cpu" or self.ranks > 1 else 1
        device_parser._check_unique = lambda device_ids: None  # pyright: ignore[reportPrivateUsage]
        return [i % torch.cuda.device_count() for i in range(self.devices)]


PLANS: dict[str, Plan] = {
    STOCK: Plan(lambda: "auto"),
    REFERENCE: Plan(lambda **o: S.SingleDeviceStrategy(**o)),
    "dp": Plan(lambda **o: S.DataParallelStrategy(**o), 2),
    "dp_3": Plan(lambda **o: S.DataParallelStrategy(**o), 3),
    "balanced_dp": Plan(lambda **o: S.BalancedDataParallelStrategy(weights=[1, 2], **o), 2),
    "ddp": Plan(lambda **o: S.DDPStrategy(batch_size_is="global", timeout_s=20, **o), 2, 2),
    "balanced_ddp": Plan(lambda **o: S.BalancedDDPStrategy(weights=[1, 2], timeout_s=20, **o), 2, 2),
    "ddp_global_view": Plan(
        lambda **o: S.DDPStrategy(batch_size_is="global", timeout_s=20, global_view=True, **o), 2, 2
    ),
    "ddp_global_view_3": Plan(
        lambda **o: S.DDPStrategy(batch_size_is="global", timeout_s=20, global_view=True, **o), 3, 3
    ),
    "model_parallel": Plan(lambda **o: S.ModelParallelStrategy(**{"num_microbatches": 2, **o}), 2),
    "ddp_model_parallel": Plan(
        lambda **o: S.DDPModelParallelStrategy(batch_size_is="global", timeout_s=20, **{"num_microbatches": 2, **o}),
        4,
        2,
    ),
    "dp_in_parts": Plan(lambda **o: S.DataParallelStrategy(**{"global_view": False, **o}), 2),
    "model_parallel_in_parts": Plan(
        lambda **o: S.ModelParallelStrategy(**{"num_microbatches": 2, "global_view": False, **o}), 2
    ),
    "fsdp": Plan(lambda **o: S.FSDPStrategy(batch_size_is="global", timeout_s=20, **o), 2, 2),
}
STRATEGIES = [name for name in PLANS if name not in (STOCK, REFERENCE) and not name.endswith("_in_parts")]
WORDS = ("equal", "exception", "remedied", "refused", "late", "raw", "warned", "wrong", "unsound")
"""`remedied`: equal (or an exception) with the remedy that a message of ours names, of a module that is none of that
untouched; `refused`: a ConfigError before the first step; `late`: a sentence of ours later, or of another type; `raw`:
any other error; `warned`: wrong, after a warning of ours; `wrong`: in silence, which no remedy mends, since nobody is
told of it; `unsound`: one device's training proves nothing."""


@dataclass
class Seen:
    """What a training showed, in one process.

    Attributes:
        values: all that a user can read of it, by name.
        error: what ended it.
        refused: whether that was a ConfigError before the first step.
        ours: whether Evener itself raised it.
        steps: optimizer steps made.
        time: seconds on the machine's clock; the first rank to fail had the cause.
        warned: warnings that came out of Evener.
        own: keys that training logs by step without `sync_dist`: under ranks documented to be rank 0's own.
    """

    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    refused: bool = False
    ours: bool = False
    steps: int = 0
    time: float = 0.0
    warned: list[str] = field(default_factory=list)
    own: set[str] = field(default_factory=set)


class Kept(Logger):
    """Keeps all that is logged."""

    name, version = "kept", "0"

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, dict[int, float]] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for key, value in metrics.items():
            self.lines.setdefault(key, {})[step or 0] = float(value)


def observe(name: str, plan_name: str, settled: bool = False, remedied: bool = False, on: str = "cpu") -> Seen:
    """Train a case on accelerators of a kind; runs in every rank of a plan that has ranks."""
    if on == "late" and not hasattr(torch, "late"):
        late_device.load(6)
        late_device.keep_freed(True)
    cases = all_cases()
    case, plan, seen, trainer = (REMEDIES if remedied else cases)[name], PLANS[plan_name], Seen(), None
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(7, verbose=False)
    for quiet in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.enter_context(_warnings_of_ours(seen.warned))
        try:
            module, data, kept = case.module(), case.data(), Kept()
            if settled:
                stack.enter_context(_settled(module))
            if plan_name == STOCK:
                _note_own_keys(module, seen.own)
            options: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": False}
            options |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": on}
            start = {key: value.clone() for key, value in _weights(module).items()}
            trainer = (pl.Trainer if plan_name == STOCK else Trainer)(
                strategy=plan.strategy() if plan_name == STOCK else plan.made(on, **case.options.get(plan_name, {})),
                devices=plan.indices(on), logger=kept,
                callbacks=case.callbacks(), **{**options, **case.trainer},
            )  # fmt: skip
            given = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {}
            trainer.fit(module, **(given or {"train_dataloaders": data[0], "val_dataloaders": data[1]}))
            seen.values = {
                "weights": _weights(module), "logged": kept.lines, "start": start,
                "callback_metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
                "logged_metrics": {key: float(value) for key, value in trainer.logged_metrics.items()},
                "global_step": trainer.global_step,
            }  # fmt: skip
        except Exception as exc:  # noqa: BLE001  # a verdict, whatever it is
            where = traceback.extract_tb(exc.__traceback__)[-1]
            seen.error = f"{type(exc).__name__}: {exc} ({Path(where.filename).name}:{where.lineno})"
            raised_by_us = str(Path(where.filename).resolve()).startswith(OURS)
            seen.ours = (
                isinstance(exc, S.ConfigError) or raised_by_us or "strategy=" in str(exc) or "strategy." in str(exc)
            )
            seen.time, seen.steps = time.monotonic(), trainer.global_step if trainer else 0
            seen.refused = isinstance(exc, S.ConfigError) and seen.steps == 0
    return seen


def _weights(module: nn.Module) -> dict[str, Tensor]:
    tensors = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    tensors = {key: value for key, value in tensors.items() if not nn.parameter.is_lazy(value)}
    whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in tensors.items()}
    return {key: value.detach().cpu().clone() for key, value in whole.items()}


@contextmanager
def _warnings_of_ours(kept: list[str]) -> Iterator[None]:
    """Keep the warnings that Evener gives, told by the frames that gave them."""

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        while frame and Path(frame.f_code.co_filename).name in ("warnings.py", "rank_zero.py", "_py_warnings.py"):
            frame = frame.f_back
        if frame and str(Path(frame.f_code.co_filename).resolve()).startswith(OURS):
            kept.append(str(message))

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("evener")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


def _note_own_keys(module: pl.LightningModule, own: set[str]) -> None:
    """Stock Lightning's run tells which values training logs by step without `sync_dist`."""
    log = module.log

    def noting(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        given = [kwargs.get(key, (*args, *[None] * 4)[i]) for key, i in (("on_step", 2), ("on_epoch", 3))]
        hook = str(module._current_fx_name)
        if module.trainer.training and hook in _FxValidator.functions and not kwargs.get("sync_dist"):
            on_step, on_epoch = _FxValidator.get_default_logging_levels(hook, *given)
            if on_step:
                own.add(f"{name}_step" if on_epoch else name)
        log(name, value, *args, **kwargs)

    module.log = noting  # type: ignore[method-assign]


@contextmanager
def _settled(module: nn.Module) -> Iterator[None]:
    """Random numbers that are the same for every sample, no dropout, and BatchNorm with its running statistics."""
    for part in module.modules():
        if hasattr(part, "p") and "Dropout" in type(part).__name__:
            part.p = 0.0
        if hasattr(part, "num_batches_tracked"):
            part.num_batches_tracked = None
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # of recurrent and attention layers

    def rows(values: Callable[[int], Tensor]) -> Callable[..., Tensor]:
        def draw(*shape: Any, device: Any = None, **kwargs: Any) -> Tensor:
            size = torch.Size(shape[0] if shape and not isinstance(shape[0], int) else shape)
            return values(math.prod(size[1:])).reshape((1, *size[1:])).expand(size).clone().to(device)

        return draw

    randn, rand = rows(lambda n: torch.linspace(-1.0, 1.0, n)), rows(lambda n: torch.linspace(0.2, 0.8, n))
    batch_norm = F.batch_norm

    def normalized(x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, *args: Any, **kw: Any) -> Any:
        return batch_norm(x, mean, var, weight, bias, False)

    with ExitStack() as stack:
        draws = {"randn": randn, "rand": rand, "randn_like": lambda x, **_: randn(x.shape, device=x.device)}
        draws |= {"rand_like": lambda x, **_: rand(x.shape, device=x.device)}
        draws |= {
            "randint": lambda low, high, size, device=None, **_: torch.full(size, (low + high) // 2, device=device)
        }
        for name, draw in draws.items():
            stack.enter_context(mock.patch.object(torch, name, draw))
        stack.enter_context(mock.patch.object(F, "batch_norm", normalized))
        yield


class Ranks(Group):
    """Processes that train one case after the other; replaced after a failure."""

    GRACE_S = 4.0
    """Seconds that the other ranks have after one has failed."""

    def __init__(self, size: int, gpus: bool = False) -> None:
        super().__init__(size, 60.0, observe, gpus)

    def train(self, *job: Any) -> list[Seen]:
        """What each rank saw."""
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send(job)
        found: dict[int, Seen] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(found) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(found):
                if self.connections[rank].poll(0.01) or not self.processes[rank].is_alive():
                    found[rank] = self._received(rank)
                    if found[rank].error:
                        deadline = min(deadline, time.monotonic() + self.GRACE_S)
        failed = any(seen.error for seen in found.values()) or len(found) < self.size
        if failed:
            self.stop()
        waiting = Seen(error="hung: waits for the other ranks", time=math.inf)
        return [found.get(rank, waiting) for rank in range(self.size)]

    def _received(self, rank: int) -> Seen:
        try:
            return self.connections[rank].recv()
        except EOFError:
            self.processes[rank].join(5)
            return Seen(error=f"the process ended with {self.processes[rank].exitcode}", time=time.monotonic())


@dataclass
class Verdict:
    """What became of a case under a plan."""

    word: str
    detail: str = ""
    own_steps: bool = False
    """Values that training logs by step without `sync_dist` are rank 0's own, as documented; all others are equal."""


class Unsound(AssertionError):
    """A case whose training on one device proves nothing."""


class Judge:
    """Verdicts of cases, each trained on one device once.

    Args:
        accelerator: the kind of all devices: `cpu`, `late` or `cuda`.
    """

    def __init__(self, accelerator: str = "cpu") -> None:
        if accelerator == "late":
            late_device.build()  # built before processes wait for it
        self.accelerator = accelerator
        self.groups = {size: Ranks(size, accelerator == "cuda") for size in {plan.ranks for plan in PLANS.values()}}
        self.references: dict[tuple[str, bool, bool], Seen] = {}

    def close(self) -> None:
        for group in self.groups.values():
            group.stop()

    def train(self, plan_name: str, name: str, settled: bool, remedied: bool) -> list[Seen]:
        return self.groups[PLANS[plan_name].ranks].train(name, plan_name, settled, remedied, self.accelerator)

    def reference(self, name: str, settled: bool = False, remedied: bool = False) -> Seen:
        """One device's training, which must show something that could differ."""
        if (name, settled, remedied) not in self.references:
            [seen] = self.train(REFERENCE, name, settled, remedied)
            stock = self.train(STOCK, name, settled, remedied)[0] if all_cases()[name].stock else Seen()
            for one in (seen, stock):
                if one.error:
                    raise Unsound(f"{name}: {one.error}")
            verify_sound(name, seen)
            seen.own = stock.own
            self.references[name, settled, remedied] = seen
        return self.references[name, settled, remedied]

    def verdict(self, case: Case, plan_name: str) -> Verdict:
        """Of the module untouched, or, where that is not equal, with its remedy."""
        try:
            found = self._judged(case, plan_name)
            if found.word in ("equal", "exception") or not has_remedy(case.name, plan_name):
                return found
            other = self._judged(case, plan_name, remedied=True)
        except Unsound as exc:
            return Verdict("unsound", str(exc))
        if found.word in ("refused", "late", "warned") and other.word in ("equal", "exception"):
            return Verdict("remedied", f"untouched {found.word}: {found.detail}", other.own_steps)
        return Verdict(found.word, f"{found.detail}; with its remedy {other.word}: {other.detail}")

    def _judged(self, case: Case, plan_name: str, remedied: bool = False) -> Verdict:
        found = self._compared(plan_name, case.name, False, remedied)
        if case.expected != "exception" or found.word not in ("warned", "wrong"):
            return found
        settled = self._compared(plan_name, case.name, True, remedied) if case.settles else found
        if settled.word == "equal" or not case.settles:
            return Verdict("exception", found.detail)
        return Verdict(settled.word, f"with its random numbers alike: {settled.detail}")

    def _compared(self, plan_name: str, name: str, settled: bool, remedied: bool) -> Verdict:
        expected, found = self.reference(name, settled, remedied), self.train(plan_name, name, settled, remedied)
        failures = [seen for seen in found if seen.error]
        if failures:
            first = min(failures, key=lambda seen: seen.time)
            word = "refused" if first.refused else "late" if first.ours else "raw"
            after = f", after {first.steps} steps" if first.steps else ""
            return Verdict(word, " ".join(first.error.split()) + after)
        return compare(expected, found, all_cases()[name].differs if settled else ())


def verify_sound(name: str, seen: Seen) -> None:
    """Refuse a reference that would be equal to anything."""
    changed = [key for key, value in seen.values["weights"].items() if not _close(value, seen.values["start"].get(key))]
    numbers = [value for line in seen.values["logged"].values() for value in line.values()]
    if not changed:
        raise Unsound(f"{name}: training changes no weight")
    if not all(map(math.isfinite, numbers)) or not all(w.isfinite().all() for w in seen.values["weights"].values()):
        raise Unsound(f"{name}: values are not finite")
    for kind in ("train", "val"):
        lines = [set(line.values()) for key, line in seen.values["logged"].items() if kind in key]
        if not any(len(line) > 1 for line in lines):
            raise Unsound(f"{name}: no value whose name has {kind!r} varies: {json.dumps(seen.values['logged'])}")


def compare(expected: Seen, found: list[Seen], without: Sequence[str] = ()) -> Verdict:
    """The verdict of trainings that ended well; logged values of the names in `without` may differ."""
    names = ("weights", "logged", "callback_metrics", "logged_metrics", "global_step")
    wanted = {key: expected.values[key] for key in names}
    differences = [
        (path, *pair) for path, *pair in _differing((), {key: found[0].values[key] for key in names}, wanted)
    ]
    for rank, one in enumerate(found[1:], 1):
        same = list(_differing((f"rank {rank}", "weights"), one.values["weights"], found[0].values["weights"]))
        differences += same
    differences = [difference for difference in differences if not set(without) & set(difference[0][1:2])]
    own = [difference for difference in differences if len(found) > 1 and expected.own & set(difference[0][1:2])]
    others = [difference for difference in differences if difference not in own]
    if not others:
        return Verdict("equal", own_steps=bool(own))
    warned = [text for seen in found for text in seen.warned if text not in expected.warned]
    path, got, want = others[0]
    text = f"{' '.join(map(str, path))} is {got} instead of {want}; {len(others)} values differ"
    return Verdict("warned", f"{text}; warned: {' '.join(warned[0].split())}") if warned else Verdict("wrong", text)


def _close(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    found, expected = found.double(), expected.double()
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((found - expected).abs() <= RELATIVE * largest + ABSOLUTE).all())  # false for nan


def _differing(path: tuple[Any, ...], found: Any, expected: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """(path, found, expected) of each value that differs."""
    if isinstance(expected, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                yield (*path, key), found.get(key, "missing"), expected.get(key, "absent")
            else:
                yield from _differing((*path, key), found[key], expected[key])
    elif isinstance(expected, Tensor):
        if not _close(found, expected):
            worst = (found - expected).abs().max().item() if found.shape == expected.shape else tuple(found.shape)
            yield path, f"off by {worst}", f"at most {float(expected.abs().max()):.3g}"
    elif not math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
        yield path, f"{found:.9g}", f"{expected:.9g}"
