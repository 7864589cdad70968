"""Replicate a submodule; the rest of the module runs once, on the root device."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..batch.run_structures import RunStructures
from ..core.errors import ConfigError
from ..core.patching import Replacement
from .runner import ReplicaRunner


class ParallelForward(Replacement):
    """Replaces a submodule's `forward`: cuts its inputs, runs the replicas, joins their outputs.

    Args:
        sizes: maps the number of samples to samples per replica.
        strategy: name that begins error messages.
    """

    def __init__(
        self,
        module: nn.Module,
        runner: ReplicaRunner,
        sizes: Callable[[int], list[int]],
        strategy: str,
        structures: RunStructures,
    ) -> None:
        super().__init__(module, "forward", self._run)
        self._sizes = sizes
        self._strategy = strategy
        self._inputs = structures.of_inputs(type(module).__name__)
        self._outputs = structures.of_results("submodule")
        self._runner = runner

    def _run(self, _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the submodule's outputs for the whole batch, on the root device."""
        num = self._inputs.num_samples((args, kwargs))
        if not num:
            raise ConfigError(
                f"{self._strategy}: the inputs of {type(self.owner).__name__} hold no tensor with a dimension, so "
                "they can't be split. Choose a submodule that takes the batch."
            )
        sizes = self._outputs.unequal(self._sizes(num))
        outputs = self._runner.run("forward", self._inputs.split((args, kwargs), sizes), sizes)
        return self._outputs.join(outputs, [size for size in sizes if size > 0], self._runner.devices[0])
