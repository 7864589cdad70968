"""Follow the metrics of a run: which pass over the loaders, and which batch of it, they are updated with."""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from ...core.module_checks import metrics_of
from .part_numbers import PartNumbers
from .states import metric_classes
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
        self.sync, self.steps, self._numbers = MetricSync(), MetricSteps(whole), PartNumbers(part, hook)
        kinds = metric_classes()
        self.sync.start(kinds)
        self.steps.start(kinds)
        self._numbers.start(kinds)
        self.has_evaluated = False
        """Whether this pass is an evaluation that has run a step."""
        self._num_passes = 0
        self._num_evaluated: Counter[int] = Counter()

    def begin_pass(self, module: nn.Module) -> None:
        """Prepare for the batches of another pass over loaders."""
        self._num_passes += 1
        self._num_evaluated.clear()
        self.has_evaluated = False
        for metric in metrics_of(module):  # without updates on this rank it may have some on others
            metric._computed = None
        self.sync.watch(module)

    def begin_training_batch(self, number: int) -> None:
        """Record that the next step is that of the training batch `number`."""
        self.sync.begin_batch((self._num_passes, number, 0, 0))

    def begin_evaluated_batch(
        self, num_trained: int, loader: int, places: Sequence[int] | None, num_ranks: int
    ) -> None:
        """Record that the next step is an evaluation's.

        Args:
            num_trained: number of training batches before it.
            places: positions of this rank's batches among all ranks' batches of the loader; None if unknown.
        """
        number = self._num_evaluated[loader]
        self._num_evaluated[loader] = number + 1
        step = -1 if places is None else places[number] // num_ranks
        self.sync.begin_batch((self._num_passes, num_trained, loader, step))

    def end(self) -> None:
        """Restore the metrics' own methods."""
        self.sync.end()
        self.steps.end()
        self._numbers.end()
