"""Record the calls of metrics in the parts of a batch, and make each once for the whole batch, when the step has ended.

Until then stand-ins take the place of what the calls return.
"""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from ..core.devices import is_out_of_memory
from ..core.errors import PartsDiffer
from ..core.module_checks import is_metric, metrics_of
from ..core.module_log import no_value
from ..core.patching import Replacement, replaced
from ..core.types import Sizes
from .results import Joiner, Unknown, are_equal, combine, is_fraction
from .structure import Path

Given: TypeAlias = dict[int | str, Any]
"""Arguments of a call by place or name."""

T = TypeVar("T")


class _Call(NamedTuple):
    """One call of a metric in a part: its arguments without graphs, and how often their tensors had been written to."""

    part: int
    metric: Any
    method: str
    given: Given
    versions: list[int]
    stand_in: Any


class PartMetrics:
    """Takes the calls of a module's metrics in the parts of a batch, until `close`; `part` returns which one runs."""

    def __init__(
        self, module: nn.Module, devices: Sequence[torch.device], strategy: str, part: Callable[[], int]
    ) -> None:
        self._devices, self._strategy, self._part = devices, strategy, part
        self._found: list[nn.Module] = []
        self._replaced: list[Replacement] = []
        self._calls: list[list[_Call]] = []  # of each part of the step that runs; empty if none does
        self._made: list[list[_Call]] = []
        self._sizes: Sizes = ()
        self._is_alone = False
        self._arguments = Joiner(lambda _: None, _raise, given=True)
        self.rows = set[Path]()  # arguments that are, by call and name; a part of one sample may squeeze them
        self.follow(module)

    def follow(self, module: nn.Module) -> None:
        """Take the calls of the metrics and collections that a module has now."""
        found: list[nn.Module] = [m for m in module.modules() if is_metric(m) or isinstance(m, MetricCollection)]
        if list(map(id, found)) == list(map(id, self._found)):
            return
        self.close()
        self._found, self._numbers = found, {id(one): number for number, one in enumerate(found)}
        self._replaced = [
            Replacement(metric, method, partial(self._called, metric, method))
            for metric in found
            for method in ("update", "forward", "compute", "reset")
        ]

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        while self._replaced:
            self._replaced.pop().remove()

    @contextmanager
    def recording(self, sizes: Sizes, rows: Collection[Path] = (), notes: bool = False) -> Generator[None]:
        """Record calls inside the block; `notes`: also those of a single part, which calls metrics itself."""
        self.rows.update(rows)
        self._sizes, self._made = sizes, []
        self._is_alone = sum(size > 0 for size in sizes) == 1
        self._calls = [] if self._is_alone and not notes else [[] for _ in sizes]
        try:
            yield
            self._made = self._calls
        finally:
            self._calls = []

    def _called(self, metric: Any, method: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._calls or (self._is_alone and method in ("compute", "reset")):
            return own(*args, **kwargs)
        name, stand_in, part = f"{self._strategy}: {type(metric).__name__}", None, self._part()
        if method in ("compute", "reset"):
            raise PartsDiffer(
                f"{name}.{method}() is called in a step, where a part of the batch is counted. Log the metric "
                "itself (self.log('name', metric)), or call it in an epoch hook"
            )
        given: Given = {key: _detached(value) for key, value in (*enumerate(args), *kwargs.items())}
        if method == "forward" and not self._is_alone:
            why = (
                f"{name} has a value of the whole batch only, which the step uses. Log or return it as it is, or use "
                "it in an epoch hook"
            )
            several = list(metric.keys()) if isinstance(metric, MetricCollection) else None
            one = no_value(why, PartsDiffer)
            stand_in = one if several is None else {key: no_value(why, PartsDiffer) for key in several}
        self._calls[part].append(_Call(part, metric, method, given, _versions(given), stand_in))
        if self._is_alone:
            with replaced(self, "_calls", []):
                return own(*args, **kwargs)
        return stand_in

    def replay(self, loss: Callable[[Sequence[Any], Sequence[int]], Any]) -> dict[Hashable, Given]:
        """Call the metrics as the parts have, once for the whole batch, and return what they are given.

        `loss` returns that of the whole batch, if values of these parts are theirs; else None.
        """
        calls, self._made = self._made, []
        groups = grouped(calls, lambda call: (self._numbers[id(call.metric)], call.method)) if any(calls) else {}
        if self._is_alone:
            return {key: call.given for key, (call,) in groups.items()}
        joined = {key: self._joined(key, same, loss) for key, same in groups.items()}
        for key, given in joined.items():
            call = groups[key][0]
            named = {name: value for name, value in given.items() if isinstance(name, str)}
            value = getattr(call.metric, call.method)(*(given[i] for i in given if isinstance(i, int)), **named)
            for stand_in in (one.stand_in for one in groups[key] if one.stand_in is not None):
                for name, one in stand_in.items() if isinstance(stand_in, dict) else [(None, stand_in)]:
                    one.known = value if name is None else value[name]
        return joined

    def _joined(self, key: Hashable, calls: Sequence[_Call], loss: Callable[..., Any]) -> Given:
        """The arguments that the whole batch has, of those of its parts."""
        names, parts, first = calls[0].given, [call.part for call in calls], self._devices[0]
        sizes, own = [self._sizes[part] for part in parts], self._devices[parts[0]]
        try:
            if any(call.given.keys() != names.keys() for call in calls):
                raise Unknown("is given other arguments in some parts of a batch")
            if any(_versions(call.given) != call.versions for call in calls):
                raise Unknown("is given a tensor that the step writes to afterwards")
            columns = {name: self._rows((key, name), [one.given[name] for one in calls], sizes) for name in names}
            if len(calls) < sum(size > 0 for size in self._sizes) and any(map(_is_number, columns.values())):
                raise Unknown("is given numbers by some parts of a batch only")
            joined: Given = {}
            for name, values in columns.items():
                whole = loss(values, parts)
                joined[name] = self._argument((key, name), calls[0].metric, columns, sizes) if whole is None else whole
        except (Unknown, RuntimeError) as exc:
            if is_out_of_memory(exc):
                raise
            raise PartsDiffer(
                f"{self._strategy}: {type(calls[0].metric).__name__} {exc}, so that what the whole batch gives it "
                "isn't known. Give it tensors with rows of samples, or call it in an epoch hook"
            ) from exc
        return (
            joined if own == first else tree_map_only(Tensor, lambda t: t.to(first) if t.device == own else t, joined)
        )

    def _argument(self, path: Path, metric: Any, columns: Mapping[int | str, list[Any]], sizes: Sequence[int]) -> Any:
        """One argument of the whole batch; numbers that are means count by their weights, else by samples."""
        values, weights = columns[path[-1]], columns.get(1, columns.get("weight"))
        kinds = {type(one) for one in metrics_of(metric) if len(metrics_of(one)) == 1} if _is_number(values) else None
        self._arguments.adds = kinds == {SumMetric}
        if kinds == {MeanMetric}:
            if weights is None or (not isinstance(weights[0], Tensor) and are_equal(weights) and weights != sizes):
                weights = sizes if values is not weights else None  # one for each batch
            if weights is not None and (values is weights or is_fraction(values[0])):
                return combine(values, weights, "sum" if values is weights else "mean", self._devices[0])
        return self._arguments.join([(values, sizes)], path)[0]

    def _rows(self, path: Path, values: list[Any], sizes: Sequence[int]) -> list[Any]:
        """Give what a part of one sample has squeezed its dimension again."""
        may_be = (isinstance(value, Tensor) and (value.dim() or n == 1) for value, n in zip(values, sizes, strict=True))
        if not all(may_be):
            return values
        if any(value.dim() for value in values):
            self.rows.add(path)
        is_rows = self._arguments.follow[path] = path in self.rows
        return [value.reshape(1) if not value.dim() else value for value in values] if is_rows else values


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


def _detached(value: Any) -> Any:  # most are tensors: torch's trees take longer
    return value.detach() if isinstance(value, Tensor) else tree_map_only(Tensor, Tensor.detach, value)


def _raise(_: Path, why: str) -> Any:
    raise Unknown(f"is given what {why}")


def _versions(given: Given) -> list[int]:
    """How often tensors have been written to; those of inference mode don't tell."""
    leaves = (one for value in given.values() for one in ([value] if isinstance(value, Tensor) else tree_leaves(value)))
    return [one._version for one in leaves if isinstance(one, Tensor) and not one.is_inference()]


def _is_number(values: Sequence[Any]) -> bool:
    first = values[0]
    return not first.dim() if isinstance(first, Tensor) else type(first) in (int, float)
