"""Record the calls of metrics in the parts of a batch, and make each once for the whole batch.

part 1   accuracy(out[:5], y[:5])  → a stand-in ┐
part 2   accuracy(out[5:], y[5:])  → a stand-in ┴→ accuracy(out, y), once the step has ended: the stand-ins' value
"""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from typing_extensions import override

from ..core.devices import is_out_of_memory
from ..core.errors import PartsDiffer
from ..core.module_checks import is_metric, metrics_of
from ..core.module_log import no_value
from ..core.patching import Replacement, replaced
from ..core.types import Sizes
from .results import Batches, Joiner, Unknown, are_equal, combine, is_fraction, is_whole
from .structure import Path, is_array

_METHODS = ("update", "forward", "compute", "reset")

WholeLoss = Callable[[Sequence[Any], Sequence[int]], Any]
"""The loss of the whole batch, if values of these parts are theirs; else None."""

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    """One call of a metric in a part.

    Args:
        given: the arguments by place or name, without graphs.
        versions: how often each tensor among them had been written to.
        returned: stands for what the call returns.
    """

    part: int
    metric: Any
    method: str
    given: dict[int | str, Any]
    versions: list[int]
    returned: Any


class PartMetrics:
    """Takes the calls of a module's metrics in the parts of a batch, until `close`.

    Args:
        module: the module, whose metrics all parts call.
        devices: of the parts; tensors on that of a part are joined on the first.
        strategy: name that begins error messages.
        part: returns which part runs on the calling thread.
    """

    def __init__(
        self, module: nn.Module, devices: Sequence[torch.device], strategy: str, part: Callable[[], int]
    ) -> None:
        self._devices, self._strategy, self._part = devices, strategy, part
        self.found = _metrics(module)
        """Identifies the metrics and collections of the module."""
        self._aggregators = {id(metric): _aggregators(metric) for metric in self.found}
        self._numbers = {id(metric): number for number, metric in enumerate(self.found)}
        self._calls: list[list[_Call]] = []
        """Of each part of the step that runs; empty if none does."""
        self._made: list[list[_Call]] = []
        self._sizes: Sizes = ()
        self._arguments = _Arguments()
        self.rows = set[Path]()
        """The arguments that are rows of samples, by call and name; a part of one sample may squeeze them."""
        self._is_alone = False
        self._replaced = [
            Replacement(metric, method, partial(self._called, metric, method))
            for metric in self.found
            for method in _METHODS
        ]

    def is_of(self, module: nn.Module) -> bool:
        """Whether a module has no other metrics than were found."""
        found = _metrics(module)
        return len(found) == len(self.found) and all(map(lambda a, b: a is b, found, self.found))

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        while self._replaced:
            self._replaced.pop().remove()

    @contextmanager
    def recording(self, sizes: Sizes, rows: Collection[Path] = (), notes: bool = False) -> Generator[None]:
        """Record calls inside the block, where parts of so many samples run.

        Args:
            rows: what is known of arguments.
            notes: also what a single part calls metrics with, which calls them itself.
        """
        self.rows.update(rows)
        self._sizes, self._made = sizes, []
        self._is_alone = sum(size > 0 for size in sizes) == 1
        with replaced(self, "_calls", [] if self._is_alone and not notes else [[] for _ in sizes]):
            yield
            self._made = self._calls

    def _called(self, metric: Any, method: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._calls:
            return own(*args, **kwargs)
        name = f"{self._strategy}: {type(metric).__name__}"
        if method in ("compute", "reset"):
            if self._is_alone:
                return own(*args, **kwargs)
            raise PartsDiffer(
                f"{name}.{method}() is called in a step, where a part of the batch is counted. Log the metric "
                "itself (self.log('name', metric)), or call it in an epoch hook or in training_step_end"
            )
        part, returned = self._part(), None
        if method == "forward":
            make = partial(no_value, f"{name} has a value of the whole batch only, which the step uses. Log or return "
                           "it as it is, or use it in training_step_end or in an epoch hook", PartsDiffer)  # fmt: skip
            is_collection = isinstance(metric, MetricCollection)
            returned = {key: make() for key in metric.keys()} if is_collection else make()  # noqa: SIM118
        given = {key: _detached(value) for key, value in (*enumerate(args), *kwargs.items())}
        self._calls[part].append(_Call(part, metric, method, given, _versions(given), returned))
        if self._is_alone:
            with replaced(self, "_calls", []):
                return own(*args, **kwargs)
        return returned

    def replay(self, loss: WholeLoss) -> dict[Hashable, Any]:
        """Call the metrics as the parts have, each call once for the whole batch.

        Returns:
            What they were given.

        Raises:
            PartsDiffer: what the whole batch would give a metric does not follow from the parts; none was called.
        """
        calls, self._made = self._made, []
        if not any(calls):
            return {}
        groups = grouped(calls, lambda call: (self._numbers[id(call.metric)], call.method))
        if self._is_alone:
            return {key: call.given for key, (call,) in groups.items()}
        joined = {key: self._joined(key, same, loss) for key, same in groups.items()}
        for key, given in joined.items():
            self._give(groups[key], given)
        return joined

    def _joined(self, key: Hashable, calls: Sequence[_Call], loss: WholeLoss) -> dict[int | str, Any]:
        """The arguments that the whole batch has, of those of its parts."""
        metric, parts = calls[0].metric, [call.part for call in calls]
        sizes = [self._sizes[part] for part in parts]
        try:
            if any(call.given.keys() != calls[0].given.keys() for call in calls):
                raise Unknown("is given other arguments in some parts of a batch")
            given = [self._moved(call) for call in calls]
            columns = {name: self._rows((key, name), [one[name] for one in given], sizes) for name in given[0]}
            if len(calls) < sum(size > 0 for size in self._sizes) and any(map(_is_number, columns.values())):
                raise Unknown("is given numbers by some parts of a batch only")
            known = {name: loss(values, parts) for name, values in columns.items()}
            return {
                name: self._argument((key, name), metric, columns, name, sizes) if known[name] is None else known[name]
                for name in columns
            }
        except (Unknown, RuntimeError) as exc:
            if is_out_of_memory(exc):
                raise
            raise PartsDiffer(
                f"{self._strategy}: {type(metric).__name__} {exc}, so that what the whole batch gives it isn't known. "
                "Give it tensors with rows of samples, or call it in training_step_end or in an epoch hook"
            ) from exc

    def _argument(
        self, path: Path, metric: Metric, columns: dict[int | str, list[Any]], name: int | str, sizes: Sequence[int]
    ) -> Any:
        """One argument of the whole batch; numbers that are means count by their weights, else by samples."""
        values, weights, kinds = columns[name], columns.get(1, columns.get("weight")), self._aggregators[id(metric)]
        if kinds == {MeanMetric} and _is_number(values):
            if weights is None or (not isinstance(weights[0], Tensor) and are_equal(weights) and weights != sizes):
                weights = sizes if values is not weights else None  # one for each batch
            if weights is not None and (values is weights or is_fraction(values[0])):
                return combine(values, weights, "sum" if values is weights else "mean", self._devices[0])
        self._arguments.adds = kinds == {SumMetric}
        return self._arguments.join([(values, sizes)], path)[0]

    def _moved(self, call: _Call) -> dict[int | str, Any]:
        """The arguments of a call, with those on the part's device on the first one."""
        if _versions(call.given) != call.versions:
            raise Unknown("is given a tensor that the step writes to afterwards")
        own, first = self._devices[call.part], self._devices[0]
        if own == first:
            return call.given
        return tree_map_only(Tensor, lambda value: value.to(first) if value.device == own else value, call.given)

    def _rows(self, path: Path, values: list[Any], sizes: Sequence[int]) -> list[Any]:
        """Give what a part of one sample has squeezed its dimension again."""
        if not all(
            isinstance(value, Tensor) and (value.dim() or n == 1) for value, n in zip(values, sizes, strict=True)
        ):
            return values
        if any(v.dim() for v in values):
            self.rows.add(path)
        is_rows = self._arguments.follow[path] = path in self.rows
        return [value.reshape(1) if not value.dim() else value for value in values] if is_rows else values

    def _give(self, calls: Sequence[_Call], given: dict[int | str, Any]) -> None:
        named = {key: value for key, value in given.items() if isinstance(key, str)}
        method = getattr(calls[0].metric, calls[0].method)
        value = method(*(value for key, value in given.items() if not isinstance(key, str)), **named)
        for returned in (call.returned for call in calls):
            if isinstance(returned, dict):
                for name, stand_in in returned.items():
                    stand_in.known = value[name]
            elif returned is not None:
                returned.known = value


class _Arguments(Joiner):
    """Joins arguments of metrics: rows, elements, what is the same in all parts, and counts; no other numbers.

    Attributes:
        adds: whether whole numbers are counts that add up.
    """

    def __init__(self) -> None:
        super().__init__(lambda _: None, self._raise)
        self.adds = False

    def _raise(self, path: Path, why: str) -> Any:
        raise Unknown(f"is given what {why}")

    @override
    def _are_samples(self, batches: Batches, path: Path, length: Callable[[Any], float]) -> bool:
        ((first, *_), _), *_ = batches
        return is_array(first) or super()._are_samples(batches, path, length)  # rows of any number, of tokens or masked

    @override
    def _leaves(self, batches: Batches, path: Path, device: torch.device | None) -> list[Any]:
        ((parts, sizes),) = batches
        first = parts[0]
        if is_whole(first) and not is_fraction(first):
            counts = not isinstance(first, Tensor) and self._are_samples(batches, path, float)
            if (counts and list(parts) == list(sizes)) or (self.adds and isinstance(first, Tensor)):
                return [combine(parts, sizes, "sum", device)]
        if not isinstance(first, Tensor) and are_equal(parts):
            return [first]
        raise Unknown("is one number for a part of a batch: a mean over samples, a sum or another")


def grouped(calls: Iterable[Sequence[T]], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    """Group the calls of parts: the k-th of a kind belong together, in the order of the parts."""
    found: dict[Hashable, list[T]] = {}
    for own in calls:
        counts = Counter[Hashable]()
        for call in own:
            kind = key(call)
            found.setdefault((kind, counts[kind]), []).append(call)
            counts[kind] += 1
    return found


def _metrics(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if is_metric(part) or isinstance(part, MetricCollection)]


def _aggregators(metric: nn.Module) -> set[type]:
    """The classes of the metrics in one that hold no others."""
    return {type(one) for one in metrics_of(metric) if len(metrics_of(one)) == 1}


def _detached(value: Any) -> Any:  # most are tensors: torch's trees take longer
    return value.detach() if isinstance(value, Tensor) else tree_map_only(Tensor, Tensor.detach, value)


def _versions(given: Mapping[int | str, Any]) -> list[int]:
    """How often tensors have been written to; those of inference mode don't tell."""
    leaves = (one for value in given.values() for one in ([value] if isinstance(value, Tensor) else tree_leaves(value)))
    return [one._version for one in leaves if isinstance(one, Tensor) and not one.is_inference()]


def _is_number(values: Sequence[Any]) -> bool:
    first = values[0]
    return not first.dim() if isinstance(first, Tensor) else type(first) in (int, float)
