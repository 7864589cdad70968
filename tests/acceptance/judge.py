"""Train a case under a plan, in a process that stays alive for all of them, and compare it with one device."""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import late_device
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from differential.pool import Pool
from lightning_fabric.utilities import device_parser
from outcomes import Failure, Verdict, alike, differences, kept
from tiny import Points, quiet
from torch import Tensor, nn

import evener.strategies
import evener.trainer
from evener.strategies import STRATEGIES as BY_NAME
from evener.trainer import Trainer

from .case import REMEDIES, Case, all_cases, has_remedy

OURS = tuple(str(Path(path).resolve()) for package in (evener.strategies, evener.trainer) for path in package.__path__)
REFERENCE, STOCK = "single_device", "lightning"


@dataclass(frozen=True)
class Plan:
    """A strategy, the number of its devices and ranks, and its options."""

    strategy: str
    devices: int = 1
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def made(self, accelerator: str, more: dict[str, Any]) -> Any:
        """The strategy; one of a single process is given its devices by name, and repeats those that there are."""
        options = {**self.options, **more}
        if self.strategy == "auto":
            return self.strategy
        make = BY_NAME[self.strategy]
        if accelerator == "cpu" or self.ranks > 1:
            return make(**options | ({"backend": "gloo"} if accelerator == "cuda" else {}))
        num = torch.get_device_module(accelerator).device_count()
        names = [f"{accelerator}:{i % num}" for i in range(self.devices)]
        return make(**{"devices": names, **options} if self.devices > 1 else {"device": names[0], **options})

    def indices(self, accelerator: str) -> Any:
        """The trainer's `devices`; ranks share the GPUs that there are, by gloo."""
        if accelerator != "cuda" or self.ranks == 1:
            return self.devices if accelerator == "cpu" or self.ranks > 1 else 1
        device_parser._check_unique = lambda device_ids: None  # pyright: ignore[reportPrivateUsage]
        return [i % torch.cuda.device_count() for i in range(self.devices)]


GLOBAL = {"batch_size_is": "global", "timeout_s": 20}
"""Of ranks: the loader's batch is the global batch, as it is under all other plans."""
WHOLE, IN_PARTS, TWO = {**GLOBAL, "global_view": True}, {"global_view": False}, {"num_microbatches": 2}
PLANS: dict[str, Plan] = {
    STOCK: Plan("auto"),
    REFERENCE: Plan("single_device"),
    "dp": Plan("dp", 2),
    "dp_3": Plan("dp", 3),
    "balanced_dp": Plan("balanced_dp", 2, 1, {"weights": [1, 2]}),
    "ddp": Plan("ddp", 2, 2, GLOBAL),
    "balanced_ddp": Plan("balanced_ddp", 2, 2, {"weights": [1, 2], "timeout_s": 20}),
    "ddp_global_view": Plan("ddp", 2, 2, WHOLE),
    "ddp_global_view_3": Plan("ddp", 3, 3, WHOLE),
    "model_parallel": Plan("model_parallel", 2, 1, TWO),
    "ddp_model_parallel": Plan("ddp_model_parallel", 4, 2, {**GLOBAL, **TWO}),
    "dp_in_parts": Plan("dp", 2, 1, IN_PARTS),
    "model_parallel_in_parts": Plan("model_parallel", 2, 1, {**TWO, **IN_PARTS}),
    "fsdp": Plan("fsdp", 2, 2, GLOBAL),
}
STRATEGIES = [name for name in PLANS if name not in (STOCK, REFERENCE) and not name.endswith("_in_parts")]
WORDS = ("equal", "exception", "remedied", "refused", "late", "raw", "warned", "wrong", "unsound")
"""`remedied`: equal (or an exception) with the remedy that a message of ours names, of a module that is none of that
untouched; `refused`: a sentence of ours before the first step; `late`: one after it; `raw`: any other error; `warned`:
wrong, after a warning of ours; `wrong`: in silence, which no remedy mends, since nobody is told of it; `unsound`: one
device's training proves nothing."""


@dataclass
class Seen:
    """What a training showed, in one process.

    Attributes:
        values: all that a user can read of it, by name.
        failure: what ended it.
        warned: warnings that came out of Evener.
        own: keys that training logs by step without `sync_dist`: under ranks documented to be rank 0's own.
    """

    values: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    warned: list[str] = field(default_factory=list)
    own: set[str] = field(default_factory=set)


def observe(name: str, plan_name: str, settled: bool = False, remedied: bool = False, on: str = "cpu") -> Seen:
    """Train a case on accelerators of a kind; runs in every rank of a plan that has ranks."""
    if on == "late" and not hasattr(torch, "late"):
        late_device.load(6)
        late_device.keep_freed(True)
    cases = all_cases()
    case, plan, seen, trainer = (REMEDIES if remedied else cases)[name], PLANS[plan_name], Seen(), None
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(7, verbose=False)
    for noisy in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.enter_context(_warnings_of_ours(seen.warned))
        try:
            module, data, points = case.module(), case.data(), Points()
            if settled:
                stack.enter_context(_settled(module))
            start = _weights(module)
            trainer = quiet(
                pl.Trainer if plan_name == STOCK else Trainer, logger=points, accelerator=on,
                strategy=plan.made(on, case.options.get(plan_name, {})), devices=plan.indices(on),
                callbacks=case.callbacks(), **{"max_epochs": 2, "log_every_n_steps": 1, **case.trainer},
            )  # fmt: skip
            given = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {}
            trainer.fit(module, **(given or {"train_dataloaders": data[0], "val_dataloaders": data[1]}))
            if plan_name == STOCK:
                logged = [value.meta for value in trainer.fit_loop.epoch_loop._results.values()]
                seen.own = {meta.forked_name(on_step=True) for meta in logged if meta.on_step and not meta.sync.should}
            metrics = {name: getattr(trainer, name) for name in ("callback_metrics", "logged_metrics")}
            seen.values = {
                "weights": _weights(module), "start": start, "global_step": trainer.global_step,
                "logged": {name: dict(points.of(name)) for name in points.last()},
                **{name: {key: float(value) for key, value in of.items()} for name, of in metrics.items()},
            }  # fmt: skip
        except Exception as exc:  # noqa: BLE001  # a verdict, whatever it is
            seen.failure = Failure.of(exc, "fit", trainer.global_step if trainer else 0)
    return seen


def _weights(module: nn.Module) -> dict[str, Any]:
    tensors = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    return kept({key: value for key, value in tensors.items() if not nn.parameter.is_lazy(value)})


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

    draws = {
        "randn": randn, "randn_like": lambda x, **_: randn(x.shape, device=x.device),
        "rand": rand, "rand_like": lambda x, **_: rand(x.shape, device=x.device),
        "randint": lambda low, high, size, device=None, **_: torch.full(size, (low + high) // 2, device=device),
    }  # fmt: skip
    with mock.patch.multiple(torch, **draws), mock.patch.object(F, "batch_norm", normalized):
        yield


class Unsound(AssertionError):
    """A case whose training on one device proves nothing."""


def verify_sound(name: str, seen: Seen) -> None:
    """Refuse a reference that would be equal to anything."""
    numbers = [value for line in seen.values["logged"].values() for value in line.values()]
    if not _unlike(seen.values["weights"], seen.values["start"], 1e-9):
        raise Unsound(f"{name}: training changes no weight")
    if not all(map(math.isfinite, numbers)) or not all(w.isfinite().all() for w in seen.values["weights"].values()):
        raise Unsound(f"{name}: values are not finite")
    for kind in ("train", "val"):
        lines = [set(line.values()) for key, line in seen.values["logged"].items() if kind in key]
        if not any(len(line) > 1 for line in lines):
            raise Unsound(f"{name}: no value whose name has {kind!r} varies: {seen.values['logged']}")


class Judge:
    """Verdicts of cases, each trained on one device once.

    Args:
        accelerator: the kind of all devices: `cpu`, `late` or `cuda`.
    """

    observe, verify_sound = staticmethod(observe), staticmethod(verify_sound)

    def __init__(self, accelerator: str = "cpu") -> None:
        if accelerator == "late":
            late_device.build()  # built before processes wait for it
        self.accelerator = accelerator
        self.pool = Pool(self.observe, timeout_s=60.0, grace_s=4.0, gpus=accelerator == "cuda")
        self.references: dict[tuple[str, bool, bool], Seen] = {}

    def train(self, plan_name: str, name: str, settled: bool, remedied: bool) -> list[Seen]:
        found = self.pool[PLANS[plan_name].ranks].run(name, plan_name, settled, remedied, self.accelerator)
        return [Seen(failure=Failure("fit", "RankError", one)) if isinstance(one, str) else one for one in found]

    def reference(self, case: Case, settled: bool = False, remedied: bool = False) -> Seen:
        """One device's training, which must show something that could differ."""
        job = (case.name, settled, remedied)
        if job not in self.references:
            [seen] = self.train(REFERENCE, *job)
            stock = self.train(STOCK, *job)[0] if case.stock else Seen()
            for one in (seen, stock):
                if one.failure:
                    raise Unsound(f"{case.name}: {one.failure.message}")
            self.verify_sound(case.name, seen)
            seen.own = stock.own
            self.references[job] = seen
        return self.references[job]

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
        found = self._compared(plan_name, case, False, remedied)
        if case.expected != "exception" or found.word not in ("warned", "wrong"):
            return found
        settled = self._compared(plan_name, case, True, remedied) if case.settles else found
        if settled.word == "equal" or not case.settles:
            return Verdict("exception", found.detail)
        return Verdict(settled.word, f"with its random numbers alike: {settled.detail}")

    def _compared(self, plan_name: str, case: Case, settled: bool, remedied: bool) -> Verdict:
        expected = self.reference(case, settled, remedied)
        found = self.train(plan_name, case.name, settled, remedied)
        if failures := [seen.failure for seen in found if seen.failure]:
            first = min(failures, key=lambda one: one.order)
            word = "refused" if first.refuses else "late" if first.says_why else "raw"
            after = f", after {first.num_steps} steps" * bool(first.num_steps)
            where = f"{Path(first.raised_in).name}{after}"
            return Verdict(word, f"{first.kind}: {' '.join(first.message.split())} ({where})")
        without = case.differs if settled or case.expected != "exception" else ()
        return compare(expected, found, without, case.tolerance)


def compare(expected: Seen, found: list[Seen], without: tuple[str, ...] = (), tolerance: float = 1e-9) -> Verdict:
    """The verdict of trainings that ended well; logged values whose names begin as one in `without` may differ."""
    names = ("weights", "logged", "callback_metrics", "logged_metrics", "global_step")
    wanted, first = ({key: seen.values[key] for key in names} for seen in (expected, found[0]))
    unlike = _unlike(first, wanted, tolerance)
    for rank, one in enumerate(found[1:], 1):
        unlike |= _unlike(one.values["weights"], first["weights"], tolerance, f"rank {rank}", "weights")
    paths = [path for path in unlike if not (path[1:] and path[1].startswith(without))]
    others = [path for path in paths if len(found) == 1 or not expected.own & set(path[1:2])]
    if not others:
        return Verdict("equal", own_steps=bool(paths))
    warned = [text for seen in found for text in seen.warned if text not in expected.warned]
    got, want = unlike[others[0]]
    text = f"{' '.join(map(str, others[0]))} is {got!s:.99} instead of {want!s:.99}; {len(others)} values differ"
    text = " ".join(text.split())
    return Verdict("warned", f"{text}; warned: {' '.join(warned[0].split())}") if warned else Verdict("wrong", text)


def _unlike(found: Any, expected: Any, tolerance: float, *path: str) -> dict[tuple[Any, ...], Any]:
    return differences(found, expected, partial(alike, rtol=tolerance, atol=tolerance / 100), *path)
