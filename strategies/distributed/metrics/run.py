"""Have torchmetrics' classes count over all ranks while a run lasts."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torchmetrics import Metric

from .part_numbers import PartNumbers
from .steps import MetricSteps
from .sync import MetricSync


class RunMetrics:
    """Computes the values of metrics over all ranks, from `__init__` until `end`.

    Args:
        whole: whether a step calls a metric once, with all samples of this rank.
        part, hook: see `PartNumbers`.

    Attributes:
        sync: the exchange of metric states between ranks.
        steps: computes the values that metrics have for one global batch.
    """

    def __init__(self, whole: bool, part: Callable[[], tuple[float, bool] | None], hook: Callable[[], str]) -> None:
        self.sync, self.steps = MetricSync(), MetricSteps(whole)
        self._replaced = ExitStack()
        kinds = _metric_classes()
        for methods in (self.sync.methods, self.steps.methods, PartNumbers(part, hook).methods):
            for kind, name, method in list(methods(kinds)):
                self._replaced.enter_context(_in_class(kind, name, method))

    def end(self) -> None:
        """Restore the metrics' own methods."""
        self._replaced.close()
        self.steps.close()


@contextmanager
def _in_class(kind: type, name: str, value: Any) -> Generator[None]:
    """Set an attribute of a class inside the block."""
    kept = {name: vars(kind)[name]} if name in vars(kind) else {}
    setattr(kind, name, value)
    try:
        yield
    finally:
        delattr(kind, name)
        for own in kept.values():
            setattr(kind, name, own)


def _metric_classes() -> set[type[Metric]]:
    """Return all classes of metrics of this process, `Metric` included."""
    found: set[type[Metric]] = set()
    left = [Metric]
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left += kind.__subclasses__()
    return found
