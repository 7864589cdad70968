"""Stand in for a value of a whole batch that can't be computed of its parts: using it raises, and nothing else does.

`forward` of a torchmetrics metric returns the value of the samples it is given. Those of a chunk, a micro-batch or a
rank may be too few for a value (R2Score needs two samples); whoever logs the metric itself does not ask for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric
from typing_extensions import override

from .errors import ConfigError
from .patching import replaced


class NoValueError(ConfigError):
    """The value of a part of a batch is used, but can't be computed."""


_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.detach, Tensor.clone, Tensor.__deepcopy__)
_properties: Any = Tensor
_ASKED = (
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference,
    *(getattr(_properties, name).__get__ for name in ("device", "is_meta", "requires_grad", "_version")),
)  # fmt: skip
"""What is asked of a tensor that is only moved, or kept."""


class NoValue(Tensor):
    """Stands for a value that isn't known, or not yet; it may be moved, but using it raises until it is `known`."""

    reason = ""
    error: type[ConfigError] = NoValueError
    known: Any = None

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unknown = [one for one in tree_leaves((args, kwargs)) if isinstance(one, NoValue) and one.known is None]
        if not unknown:
            args, kwargs = tree_map_only(NoValue, known, (args, kwargs or {}))
            return func(*args, **kwargs)
        if func in _MOVES:
            return args[0]
        if func in _ASKED:
            return func(torch.zeros(()))
        raise unknown[0].error(unknown[0].reason)

    def __getattr__(self, name: str) -> Any:
        if name in ("items", "keys", "get"):  # of a metric that returns several values
            raise self.error(self.reason)
        raise AttributeError(name)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"NoValue({self.reason})"


def known(value: Any) -> Any:
    """What a `NoValue` stands for, as far as it is known."""
    return value if not isinstance(value, NoValue) or value.known is None else value.known


def part_value(metric: Metric, forward: Callable[..., Any], keep: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` of a metric, perhaps replaced, with a part of a batch, which the metric counts in any case.

    Args:
        keep: called with the metric before each value of the part; None for nothing.

    Returns:
        The value of these samples, or a `NoValue`.
    """
    compute, name = metric.compute, type(metric).__name__

    def computed() -> Any:
        if keep is not None:
            keep(metric)
        try:
            return compute()
        except NoValueError:
            raise
        except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as exc:
            return no_value(
                f"{name}: the value of a part of the batch can't be computed ({exc}). Call {name}.update(...) if only "
                "the epoch's value is wanted, or log the metric itself (under ranks with sync_dist=True), which has "
                "the whole batch's value."
            )

    with replaced(metric, "compute", computed):
        try:
            return forward(*args, **kwargs)
        except NoValueError as exc:  # of a metric within this one
            return no_value(str(exc))


def no_value(reason: str, error: type[ConfigError] = NoValueError) -> NoValue:
    """Make a `NoValue` that raises an error with a reason."""
    value = torch.zeros(()).as_subclass(NoValue)
    value.reason, value.error = reason, error
    return value
