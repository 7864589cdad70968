"""Refuse state that a training step computes from the samples of a part of a batch.

A rank, a replica and a micro-batch have some samples of a batch each. A moving average, a running maximum, the counts
of a codebook or a bank of features that the step writes to the module would be another one in each of them, and none
of them one device's. What is the same in all of them (a counter) is one device's. Metrics combine their states, and
BatchNorm's are documented.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import MetricCollection

from ...core.devices import precise_dtype
from ...core.errors import ConfigError
from ...core.module_checks import is_metric, is_plain
from ...core.private import of_torch

_BLOCKS = 256
"""Sums by which a tensor is compared."""
_ROUNDING = 16
"""Difference of sums that devices of several kinds may make, in units of the last place."""
_MOST_STEPS = 8
"""Steps that are watched, if all samples of each batch are in one part."""


@dataclass(frozen=True)
class _Values:
    """What is compared of a tensor: sums of blocks of its elements and of their absolute values."""

    shape: tuple[int, ...]
    sums: tuple[float, ...]
    sizes: tuple[float, ...]
    eps: float

    def differ(self, other: "_Values") -> bool:
        """Whether two parts have other values, but for rounding."""
        if (self.shape, len(self.sums)) != (other.shape, len(other.sums)):
            return True
        pairs = zip(self.sums, other.sums, self.sizes, other.sizes, strict=True)
        return any(abs(a - b) > _ROUNDING * self.eps * max(one, two) for a, b, one, two in pairs)


@dataclass(frozen=True)
class _Change:
    """What a step has left of one tensor; `is_kept` says that it is there to be read by later steps."""

    values: _Values
    is_kept: bool


_Part: TypeAlias = tuple[int, dict[str, _Change]]
"""The number of the call that cut a batch, and what a part of it has changed, by name."""


class StateWatch:
    """Compares what the first training step of a run does to the module in each part of its batch.

    Args:
        strategy: name that begins messages.
        refuses: whether state that a part has of its own is refused; else a warning tells of it.
    """

    def __init__(self, strategy: str, refuses: bool = True) -> None:
        self._strategy, self._refuses = strategy, refuses
        self._parts: list[_Part] = []
        self._noted: dict[str, _Change] = {}
        self._is_unclear = False
        self._num_calls = self._num_steps = 0
        self.has_ended = False
        """Whether there is nothing left to watch."""

    def begin_call(self) -> None:
        """Begin a call that cuts a batch; parts of one call are compared."""
        self._num_calls += 1

    @contextmanager
    def part(self, module: nn.Module, by_assignment: bool = True) -> Generator[None]:
        """Watch a part of a batch inside the block.

        Args:
            module: what runs it; several replicas may do so at the same time.
            by_assignment: look at attributes that are set to other values, too.
        """
        call, before = self._num_calls, _states(module)
        old = {name: _values(value) for name, (value, _) in before.items()}
        yield
        after, changed = _states(module), dict[str, _Change]()
        for name in before.keys() & after.keys():
            value, is_kept = after[name]
            is_kept = is_kept or (isinstance(value, Tensor) and value is before[name][0])
            values = _values(value)
            if values != old[name] and (is_kept or by_assignment):
                changed[name] = _Change(values, is_kept)
        self._parts.append((call, changed | self._noted))
        self._noted = {}
        self._is_unclear |= by_assignment and not after.keys() <= before.keys()

    def note(self, name: str, tensor: Tensor) -> None:
        """Note what a part writes to a tensor that the module has only while the part runs."""
        if not self.has_ended:
            self._noted[name] = _Change(_values(tensor), is_kept=True)

    def close(self, gather: Callable[[Any], Sequence[Any]] = lambda told: [told]) -> None:
        """Compare the parts of a step; every rank must call it.

        Args:
            gather: collects the parts of all ranks.

        Raises:
            ConfigError: a tensor that later steps read differs between parts; the message names it.
        """
        told = gather((self._parts, self._is_unclear))
        self._parts, self._is_unclear = [], False
        self._num_calls, self._num_steps = 0, self._num_steps + 1
        calls: dict[int, list[dict[str, _Change]]] = {}
        for parts, _ in told:
            for call, changed in parts:
                calls.setdefault(call, []).append(changed)
        found = [item for parts in calls.values() for item in _differing(parts)]
        is_unclear = self._num_steps == 1 and any(unclear for _, unclear in told)
        compared = any(len(parts) > 1 for parts in calls.values())
        self.has_ended = (compared and not is_unclear) or self._num_steps == _MOST_STEPS
        if found:
            self._tell(sorted({name for name, is_kept in found if is_kept}), sorted({name for name, _ in found}))

    def _tell(self, kept: Sequence[str], names: Sequence[str]) -> None:
        told = (
            "{}: training_step changes {} otherwise in each part of a batch (a rank's, a replica's, a micro-batch). {} "
            "Compute it from the whole batch (under ranks self.trainer.strategy.reduce(value) averages it), update it "
            "in on_train_batch_end if it does not depend on samples, or use strategy=single_device."
        )
        if kept and self._refuses:
            raise ConfigError(told.format(self._strategy, ", ".join(kept), "Training would not be one device's."))
        self.has_ended = True
        why = "If later steps read it, training is not one device's."
        rank_zero_warn(told.format(self._strategy, ", ".join(names), why))


def _differing(parts: Sequence[dict[str, _Change]]) -> Iterator[tuple[str, bool]]:
    """The names of what differs between parts, and whether later steps read it."""
    for name in {name for changed in parts for name in changed}:
        changes = [changed.get(name) for changed in parts]
        known = [change for change in changes if change is not None]
        if len(known) < len(changes) or any(known[0].values.differ(other.values) for other in known[1:]):
            yield name, any(change.is_kept for change in known)


def own_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and those in it, with the prefixes of their names, but for metrics and BatchNorm layers."""
    if not (is_metric(module) or isinstance(module, MetricCollection)):
        if not isinstance(module, of_torch.BatchNorm):
            yield prefix, module
        for name, child in module.named_children():
            yield from own_parts(child, f"{prefix}{name}.")


def _states(module: nn.Module) -> dict[str, tuple[Tensor | float, bool]]:
    """What a module keeps, by name, and whether it says so: parameters and persistent buffers.

    Attributes may be numbers and tensors. Parameters that a step of manual optimization trains are left out.
    """
    by_hand = isinstance(module, LightningModule) and not module.automatic_optimization
    found: dict[str, tuple[Any, bool]] = {}
    for prefix, part in own_parts(module):
        for name, value in part.named_parameters(recurse=False):
            if not (by_hand and value.requires_grad):
                found[prefix + name] = value, True
        for name, value in part.named_buffers(recurse=False):
            found[prefix + name] = value, name not in of_torch.non_persistent_buffers(part)
        for name, value in vars(part).items():
            if isinstance(value, float) or (
                isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
            ):
                found[prefix + name] = value, False
    return {name: item for name, item in found.items() if not isinstance(item[0], Tensor) or _has_values(item[0])}


def _has_values(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_quantized


@torch.no_grad()
def _values(value: Tensor | float) -> _Values:
    if not isinstance(value, Tensor):
        return _Values((), (value,), (abs(value),), torch.finfo(torch.float64).eps)
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1)
    flat = flat.float() if flat.element_size() == 1 else flat  # torch can't sum float8
    num = max(1, min(_BLOCKS, flat.numel()))
    width, dtype = flat.numel() // num, precise_dtype(flat.device)
    blocks = (flat[: num * width].view(num, width), flat[num * width :].view(1, -1))
    sums = torch.cat([block.sum(1, dtype=dtype) for block in blocks]).tolist()
    if not flat.is_floating_point():
        return _Values(tuple(value.shape), tuple(sums), tuple(sums), 0.0)
    sizes = torch.cat([torch.linalg.vector_norm(block, 1, dim=1, dtype=dtype) for block in blocks]).tolist()
    return _Values(tuple(value.shape), tuple(sums), tuple(sizes), torch.finfo(flat.dtype).eps)
