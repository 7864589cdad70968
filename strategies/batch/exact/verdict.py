"""Say what was found of a step that is computed in parts of a batch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from ...core.devices import precise_dtype
from ...core.module_log import lightning_modules, module_log, received
from .programs import RETURNED, Program, Programs, Tape


@dataclass(frozen=True)
class Plan:
    """How the loss of a part is weighted: by samples without a program, else by a leaf, its `base`.

    Without a base the gradient of each leaf is put in its place.
    """

    program: Program | None = None
    base: int | None = None

    @property
    def is_of_samples(self) -> bool:
        """Whether the loss is a mean over samples, so that nothing need be read in a step."""
        return self.program is None

    @property
    def needs_all(self) -> bool:
        """Whether the gradients of leaves are put in their place, for which those of all parts must be known."""
        return self.program is not None and self.base is None


OF_SAMPLES = Plan()


class Views(NamedTuple):
    """How a strategy cuts batches: before they are collated, after it, or both."""

    ranks: bool
    chunks: bool


@dataclass
class Verdict:
    """What was found; in manual optimization each call of `manual_backward` has a plan."""

    plans: list[Plan] = field(default_factory=lambda: [OF_SAMPLES])  # none if batches can't be cut
    refusal: str = ""  # what differs, and what to do
    in_chunks: bool = False  # whether parts of ranks are right, and chunks of these are not
    unlike: str = ""  # the logged values that parts don't give, and what to do
    told: list[str] = field(default_factory=list[str])  # lines for the log
    failed: bool = False  # nothing could be compared, perhaps as the step has raised an error
    raised: bool = False
    programs: dict[str, Program] = field(default_factory=dict[str, Program])  # these three see `Values`
    readings: dict[str, str] = field(default_factory=dict[str, str])
    rows: set[Any] = field(default_factory=set[Any])
    unused: bool = False  # some trained parameters take no part in a loss
    outside: set[str] = field(default_factory=set[str])  # those used outside of their forward, or chosen
    has_changed: Callable[[], bool] | None = None  # whether the step computes otherwise by now

    def waits(self, again: Collection[bool]) -> bool:
        """Whether to compare later, see `verified`."""
        return self.failed and self.raised in again


@dataclass
class Values:
    """The programs of a run's logged values, by step and loader, and the leaves of the batch in process.

    So are what the `batch_size` of each name is (the number of `samples`, a `constant`, or `given`), and the arguments
    of metrics that are rows of samples. `calls` of the step on the batch, of which closures make several, have the rows
    of this process's part by name, and its own values; `over_ranks` are parts of others.
    """

    programs: dict[tuple[str, int], Programs] = field(default_factory=dict[tuple[str, int], Programs])
    readings: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict[tuple[str, int], dict[str, str]])
    rows: dict[tuple[str, int], set[Any]] = field(default_factory=dict[tuple[str, int], set[Any]])
    over_ranks: bool = False
    calls: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=lambda: [({}, {})])

    def learn(self, step: str, loader: int, found: Verdict) -> None:
        """Keep what was found of what a step logs, and gives metrics."""
        place = step, loader
        self.programs[place], self.readings[place], self.rows[place] = found.programs, found.readings, found.rows

    def reading(self, step: str, loader: int, name: str) -> str:
        """What the `batch_size` of a value is; `samples` if that is not known."""
        return self.readings.get((step, loader), {}).get(name, "samples")

    def of(self, step: str, loader: int = 0) -> Programs:
        """The programs of what a step logs."""
        return {name: own for name, own in self.all_of(step, loader).items() if name != RETURNED}

    def all_of(self, step: str, loader: int = 0) -> Programs:
        """Those, and of its loss."""
        return self.programs.get((step, loader), {})

    def knows_none(self, step: str) -> bool:
        """Whether a step is known to have no programs."""
        known = [programs for (name, _), programs in self.programs.items() if name == step]
        return bool(known) and not any(known)

    def begin(self) -> None:
        """Begin another call of the step."""
        self.calls.append(({}, {}))

    def recorded(self, step: str, loader: int, module: pl.LightningModule, call: Callable[[], Any]) -> Any:
        """Run a step, and record what its logged values are computed of."""
        programs = self.all_of(step, loader)
        if not programs:
            return call()

        def log(keep: Callable[..., None], name: str, value: Any, *args: Any, **options: Any) -> None:
            keep(name, self.noted(name, value) if name in programs else value, *args, **options)

        own = map(module_log, lightning_modules(module))
        with received((one, partial(log, one.keep)) for one in own), Tape(programs) as tape:
            output = call()
        self.calls[-1][0].update((name, tape.rows(program)) for name, program in programs.items())
        return output

    def noted(self, name: str, value: Any) -> Any:
        """Note a value; returns what is logged for it until those of other ranks are known."""
        if not self.over_ranks or not isinstance(value, (Tensor, int, float)):
            return value
        self.calls[-1][1][name] = kept = torch.as_tensor(value).detach().clone().reshape(())
        return torch.where(kept.isnan(), torch.zeros_like(kept), kept)  # which would stay in sums

    def packed(self, programs: Programs, device: torch.device) -> Tensor:
        """What other ranks need of this one's part, of shape (n,)."""
        packed = list[Tensor]()
        for (rows, logged), (name, program) in product(self.calls, programs.items()):
            own = rows.get(name) if name in logged else None
            if own is None:
                packed.append(torch.zeros(1 + sum(program.sizes)))
            else:
                packed += [1 - program.fits(own, logged[name]).double().reshape(1), own]
        return torch.cat([one.to(device, precise_dtype(device)) for one in packed])


def combined(programs: Programs, packed: Tensor) -> list[dict[str, Tensor]]:
    """The values of each call, of what all ranks have packed, of shape (ranks, n); nan where programs don't fit."""
    size = sum(1 + sum(program.sizes) for program in programs.values())
    return [_of_call(programs, own) for own in packed.split(size, 1)] if size else []


def _of_call(programs: Programs, packed: Tensor) -> dict[str, Tensor]:
    found, start = dict[str, Tensor](), 0
    for name, program in programs.items():
        end = start + 1 + sum(program.sizes)
        value = program.value(program.merged(packed[:, start + 1 : end]))
        found[name] = torch.where(packed[:, start].sum() > 0, torch.full_like(value, torch.nan), value)
        start = end
    return found
