"""What modules do to themselves in a step on replicas: values that they log, attributes that they assign."""

import inspect
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from .reduction import ChunkLosses
from .replicas import Replicas, are_same, attribute_values

_EXTREMES: dict[Any, Callable[[Any], Any]] = {
    "max": max,
    "min": min,
    max: max,
    min: min,
    torch.max: max,
    torch.min: min,
}
_SUMS = ("sum", sum, torch.sum)


@dataclass(frozen=True)
class _Call:
    """One call of `self.log`, by number of the replica and of the module in it."""

    replica: int
    module: int
    name: str
    value: Any
    kept: Any
    options: dict[str, Any]


class LogRecorder:
    """Records `self.log` on every replica, and logs each name once, on the root, for the whole batch.

    Args:
        modules: the modules of every replica that logs, the root's first, each in one order.
        device: where the values are combined.
        original: finds the root's metric where a replica's is logged.
    """

    def __init__(
        self, modules: Sequence[Sequence[nn.Module]], device: torch.device, original: Callable[[Any], Any]
    ) -> None:
        self._original = original
        self._device = device
        self._modules = [[m for m in replica if isinstance(m, pl.LightningModule)] for replica in modules]
        self._calls: list[list[_Call]] = []
        self._recorders = [
            [self._recorder(i, j) for j in range(len(modules))] for i, modules in enumerate(self._modules)
        ]

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the calls of one step."""
        self._calls = [[] for _ in self._modules]
        before = [[module.__dict__.get("log") for module in modules] for modules in self._modules]
        for modules, recorders in zip(self._modules, self._recorders, strict=True):
            for module, recorder in zip(modules, recorders, strict=True):
                module.__dict__["log"] = recorder
        try:
            yield
        finally:
            for modules, logs in zip(self._modules, before, strict=True):
                for module, log in zip(modules, logs, strict=True):
                    if log is None:
                        del module.__dict__["log"]
                    else:
                        module.__dict__["log"] = log

    def replay(self, sizes: Sequence[int], losses: ChunkLosses | None = None) -> None:
        """Log on the root what was recorded.

        The loss itself is combined as the loss is. Other values are weighed by the `batch_size` that they were logged
        with, else by samples; `reduce_fx` of sum, max and min are what they are over the whole batch.

        Args:
            sizes: samples per replica, 0 where it had none.
            losses: the chunks' losses, one per replica with samples.
        """
        for same in self._same_calls():
            weights = [call.options.get("batch_size") or sizes[call.replica] for call in same]
            options: Any = same[0].options
            if options.get("batch_size") is not None or len(same) < sum(size > 0 for size in sizes):
                options = options | {"batch_size": sum(weights)}
            value = self._loss(same, sizes, losses)
            if value is None:
                value = self._combined(same, weights)
            self._modules[0][same[0].module].log(same[0].name, value, **options)

    def _same_calls(self) -> list[list[_Call]]:
        """The calls that log one name for the whole batch, in the order of the replicas."""
        found: dict[tuple[int, str, int], list[_Call]] = {}
        for calls in self._calls:
            counts: Counter[tuple[int, str]] = Counter()
            for call in calls:
                key = (call.module, call.name)
                found.setdefault((*key, counts[key]), []).append(call)
                counts[key] += 1
        self._calls = []
        return list(found.values())

    def _recorder(self, replica: int, module: int) -> Callable[..., None]:
        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            options.update(zip(_LOG_OPTIONS, args, strict=False))
            kept = value if not isinstance(value, Tensor) else _kept(value, options)
            self._calls[replica].append(_Call(replica, module, name, value, kept, options))

        return log

    def _loss(self, calls: list[_Call], sizes: Sequence[int], losses: ChunkLosses | None) -> Tensor | None:
        """The batch's loss, where that is what was logged."""
        used = [i for i, size in enumerate(sizes) if size > 0]
        if losses is None or [call.replica for call in calls] != used:
            return None
        if not all(_shares(call.value, losses.losses[i]) for i, call in enumerate(calls)):
            return None
        return ChunkLosses([call.kept for call in calls], losses.weights, losses.reduction).combine(self._device)

    def _combined(self, calls: list[_Call], weights: Sequence[int]) -> Any:
        values = [call.kept for call in calls]
        reduction = calls[0].options.get("reduce_fx", "mean")
        if not isinstance(values[0], (Tensor, int, float)):
            return self._original(values[0])
        if any(isinstance(value, Tensor) for value in values):
            values = [torch.as_tensor(value, device=self._device).reshape(()) for value in values]
        if reduction in _EXTREMES:
            return _EXTREMES[reduction](values)
        if reduction in _SUMS:
            return sum(values)
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


_LOG_OPTIONS = list(inspect.signature(pl.LightningModule.log).parameters)[3:]  # after self, name and value


def _kept(value: Tensor, options: dict[str, Any]) -> Tensor:
    """The value as it is now: `loss += penalty` after `self.log("loss", loss)` must not change it."""
    return value.clone() if options.get("enable_graph") else value.detach().clone()


def _shares(value: Any, loss: Tensor) -> bool:
    """Whether a logged value is the loss, or the loss detached."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.data_ptr() == loss.data_ptr()


class AttributeWatch:
    """Warns, once by name, of an attribute that was assigned on a replica, where nobody will read it.

    The module itself is watched in every step, the modules inside it in the first step of each kind.

    Args:
        replicas: the replicas to watch.
        strategy: the name to begin warnings with.
    """

    def __init__(self, replicas: Replicas, strategy: str) -> None:
        self._replicas = replicas
        self._strategy = strategy
        self._kinds: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    @contextmanager
    def watching(self, kind: str) -> Generator[None]:
        """Watch one step, `training_step` for example."""
        modules = [module for watched in self._replicas.modules()[1:] for module in self._watched(watched, kind)]
        before = [attribute_values(module) for module in modules]
        yield
        self._kinds.add(kind)
        for module, values in zip(modules, before, strict=True):
            if not are_same(values, attribute_values(module)):
                self._warn(module, values, kind)

    def _watched(self, modules: list[nn.Module], kind: str) -> list[nn.Module]:
        return modules if kind not in self._kinds else modules[:1]

    def _warn(self, module: nn.Module, before: tuple[Any, ...], kind: str) -> None:
        old = list(before) + [None] * (len(module.__dict__) - len(before))
        for (name, value), previous in zip(module.__dict__.items(), old, strict=False):
            key = (type(module).__name__, name)
            if value is not previous and not are_same((value,), (previous,)) and key not in self._warned:
                self._warned.add(key)
                rank_zero_warn(
                    f"{self._strategy}: {key[0]}.{name} was assigned on a replica in {kind}. Only the root's own, "
                    "of its own chunk, is kept. Use self.log, a torchmetrics metric, or return it from the step."
                )
